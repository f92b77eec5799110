"""Arrays for the tests of crossdock.compat: NumPy's, or torch's on the CPU, or on the GPU of the thread."""
# SPDX-License-Identifier: Apache-2.0
import time

import numpy as np

try:
    import torch
except ImportError:
    torch = None


class NumPyKit:
    name = "numpy"

    def bf16(self, codes):
        return codes.copy()

    def e4m3(self, codes):
        return codes.copy()

    def array(self, values):
        return np.ascontiguousarray(values)

    def transposed(self, values):
        """[rows, n], one column after the other, as DeepEP's own scripts pass scales."""
        return np.asfortranarray(values)

    def codes(self, array):
        """What came out, bf16 and e4m3 as codes."""
        return np.asarray(array)

    def is_bf16(self, array):
        return array.dtype == np.uint16

    def is_e4m3(self, array):
        return array.dtype == np.uint8

    def assign(self, array, codes):
        array[...] = codes


class TorchKit:
    name = "torch"

    def __init__(self, device="cpu", shared=False):
        """``shared``: threads of other ranks use the same GPU."""
        self.device, self._shared = device, shared

    def _settle(self):
        """Where ranks share a GPU no copy is queued behind a kernel that waits for another rank: that rank's
        own copies, which come before its next call, may have to wait for the queue, or for the driver's
        staging memory."""
        if not self._shared:
            return
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        end = time.monotonic() + 300
        while not done.query():
            if time.monotonic() > end:
                raise TimeoutError(f"what runs on {self.device} has not ended in 300 s")
            time.sleep(1e-4)

    def _there(self, array):
        self._settle()
        return torch.from_numpy(np.array(array, copy=True)).to(self.device)

    def bf16(self, codes):
        return self._there(codes.view(np.int16)).view(torch.bfloat16)

    def e4m3(self, codes):
        return self._there(codes).view(torch.float8_e4m3fn)

    def array(self, values):
        return self._there(values)

    def transposed(self, values):
        return self._there(values).t().contiguous().t()

    def codes(self, array):
        self._settle()
        if array.dtype == torch.bfloat16:
            return array.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        if array.dtype == torch.float8_e4m3fn:
            return array.contiguous().view(torch.uint8).cpu().numpy()
        return array.cpu().numpy()

    def is_bf16(self, array):
        return array.dtype == torch.bfloat16

    def is_e4m3(self, array):
        return array.dtype == torch.float8_e4m3fn

    def assign(self, array, codes):
        array.copy_(self.bf16(codes))


KITS = [NumPyKit()] + ([TorchKit()] if torch is not None else [])
