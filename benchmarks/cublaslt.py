# SPDX-License-Identifier: Apache-2.0
"""Algorithms of cuBLASLt for ``x @ w.T`` in bf16, by ctypes: how far is torch's default choice from the best one?"""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import os
from collections.abc import Callable

import torch
from torch import Tensor

_R_16BF, _R_32F, _COMPUTE_32F, _OP_T = 14, 0, 68, 1
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _PREFERENCE_WORKSPACE = 3, 7, 8, 1
EPILOGUE_DEFAULT, EPILOGUE_BIAS, EPILOGUE_GELU_BIAS = 1, 4, 36


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


def _library() -> ctypes.CDLL:
    """The cuBLASLt that torch has already loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcublasLt.so" in line}
    if not paths:
        root = os.path.dirname(os.path.dirname(torch.__file__))
        paths = set(glob.glob(f"{root}/nvidia/**/libcublasLt.so.*", recursive=True))
    return ctypes.CDLL(sorted(paths)[0])


class Lt:
    """A handle, a workspace, and the heuristic's candidates for a shape."""

    def __init__(self, workspace_mib: int = 64) -> None:
        self._lib = _library()
        self._handle = ctypes.c_void_p()
        self._check(self._lib.cublasLtCreate(ctypes.byref(self._handle)))
        self._workspace = torch.empty(workspace_mib << 20, dtype=torch.uint8, device="cuda")

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLASLt status {status}")

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        create = self._lib.cublasLtMatrixLayoutCreate
        self._check(
            create(ctypes.byref(layout), _R_16BF, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        )
        return layout

    def _set(self, desc: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        self._check(
            self._lib.cublasLtMatmulDescSetAttribute(
                desc, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            )
        )

    def candidates(
        self, x: Tensor, w: Tensor, out: Tensor, count: int = 16, bias: Tensor | None = None, gelu: bool = False
    ) -> list[Callable[[], None]]:
        """Runnable candidates for ``out = x @ w.T``, in the heuristic's order. Row-major x [M, K], w [N, K], out [M, N]."""
        rows, inner = x.shape
        columns = w.shape[0]
        desc, preference = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._lib.cublasLtMatmulDescCreate(ctypes.byref(desc), _COMPUTE_32F, _R_32F))
        self._set(desc, _DESC_TRANSA, ctypes.c_int32(_OP_T))
        if bias is not None:
            self._set(desc, _DESC_EPILOGUE, ctypes.c_uint32(EPILOGUE_GELU_BIAS if gelu else EPILOGUE_BIAS))
            self._set(desc, _DESC_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        # Row-major matrices are column-major transposes: out.T [N, M] = w @ x.T.
        a, b, c = self._layout(inner, columns), self._layout(inner, rows), self._layout(columns, rows)
        self._check(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        limit = ctypes.c_size_t(self._workspace.numel())
        self._check(
            self._lib.cublasLtMatmulPreferenceSetAttribute(
                preference, _PREFERENCE_WORKSPACE, ctypes.byref(limit), ctypes.c_size_t(ctypes.sizeof(limit))
            )
        )
        results, found = (_Heuristic * count)(), ctypes.c_int()
        self._check(
            self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, desc, a, b, c, c, preference, count, results, ctypes.byref(found)
            )
        )
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

        def run(result: _Heuristic) -> None:
            self._check(
                self._lib.cublasLtMatmul(
                    self._handle, desc, ctypes.byref(one), ctypes.c_void_p(w.data_ptr()), a,
                    ctypes.c_void_p(x.data_ptr()), b, ctypes.byref(zero), ctypes.c_void_p(out.data_ptr()), c,
                    ctypes.c_void_p(out.data_ptr()), c, ctypes.byref(result.algo),
                    ctypes.c_void_p(self._workspace.data_ptr()), limit,
                    ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                )
            )  # fmt: skip

        return [lambda result=results[i]: run(result) for i in range(found.value) if results[i].state == 0]
