"""Where a request goes: who holds which prefix, what each worker would cost, and the policies that pick one."""
