class UserError(Exception):
    """Something the user can mend. It ends the program with this one line on stderr and exit code 2, no traceback."""
