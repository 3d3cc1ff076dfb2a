"""`python -m fedbilevel`"""

from fedbilevel.command.main import main

main()
