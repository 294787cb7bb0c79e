"""Holds as many bytes as the argument says by cuMemAlloc, says so, and sleeps until it is killed."""

import sys
import time

from suite.cuda import Cuda

cuda = Cuda()
block = cuda.alloc(int(sys.argv[1]))
print("holding", flush=True)
time.sleep(60)
