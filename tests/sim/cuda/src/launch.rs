//! Launches: they take time and compute nothing. CUDA Driver API, "Execution Control".

use crate::abi::{Result, exports, exports_both, get, resolve};
use crate::capture;
use crate::context::current;
use crate::driver::driver;
use crate::graph::Kernel;
use crate::module::Function;
use crate::stream::{Flavour, Stream, stream};
use simgpu::config::Duration;
use simgpu::engine::{Op, WHOLE};
use std::ffi::{c_int, c_uint, c_void};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_KERNEL_NODE_PARAMS_v1,
    CUDA_LAUNCH_PARAMS, CUfunction, CUlaunchConfig, CUstream,
};

const MAX_THREADS: u64 = 1024;
/// `CU_LAUNCH_PARAM_*`, the keys of `extra`.
const PARAM_END: usize = 0;
const PARAM_BUFFER_POINTER: usize = 1;

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub grid: [c_uint; 3],
    /// Threads of a block.
    pub block: [c_uint; 3],
}

impl Shape {
    fn blocks(self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    /// What its blocks take of so many multiprocessors, in thousandths.
    fn width(self, sm_count: u32) -> u16 {
        let threads: u64 = self.block.iter().map(|&n| u64::from(n)).product();
        #[allow(clippy::cast_sign_loss, reason = "constants above zero")]
        let (resident, most) = (THREADS_PER_SM as u64, BLOCKS_PER_SM as u64);
        let at_once = u64::from(sm_count.max(1)) * (resident / threads.max(1)).clamp(1, most);
        let parts = self.blocks().saturating_mul(u64::from(WHOLE)).div_ceil(at_once);
        u16::try_from(parts).unwrap_or(WHOLE).min(WHOLE)
    }

    fn op(self, ns: u64, sm_count: u32) -> Result<Op> {
        let ns = ns.saturating_add(driver()?.session.config().costs.launch_ns);
        Ok(Op::Part { ns, width: self.width(sm_count) })
    }

    pub(crate) fn check(self) -> Result<()> {
        let threads: u64 = self.block.iter().map(|&n| u64::from(n)).product();
        let fits = (1..=MAX_THREADS).contains(&threads)
            && self.block[2] <= 64
            && self.grid[0] > 0
            && self.grid[0] <= 0x7fff_ffff
            && (1..=65_535).contains(&self.grid[1])
            && (1..=65_535).contains(&self.grid[2]);
        if fits { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
}

#[inline]
pub(crate) fn duration(
    function: &Function,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<u64> {
    match function.duration {
        Duration::Fixed(ns) => Ok(ns),
        Duration::Parameter(index) => parameter(index as usize, params, extra),
        // Nobody watches the word for a node of a graph.
        Duration::Word(_) => Err(CUDA_ERROR_NOT_SUPPORTED),
    }
}

/// The kernel's parameter number `index`, a `u64`: of `kernelParams`, or of the packed buffer.
fn parameter(index: usize, params: *mut *mut c_void, extra: *mut *mut c_void) -> Result<u64> {
    if !params.is_null() {
        let pointer: *mut c_void = get(params.wrapping_add(index))?;
        return get(pointer.cast::<u64>());
    }
    if extra.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for pair in 0..4 {
        let key = get(extra.wrapping_add(2 * pair))? as usize;
        let value: *mut c_void = get(extra.wrapping_add(2 * pair + 1))?;
        match key {
            PARAM_END => break,
            PARAM_BUFFER_POINTER => return get(value.cast::<u64>().wrapping_add(index)),
            _ => {}
        }
    }
    Err(CUDA_ERROR_INVALID_VALUE)
}

#[inline]
fn launch(
    f: CUfunction,
    shape: Shape,
    s: &'static Stream,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    is_chained: bool,
) -> Result<()> {
    let function: &Function = resolve(f)?;
    shape.check()?;
    if s.is_capturing() {
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        let shape = [gx, gy, gz, bx, by, bz, 0];
        let node = CUDA_KERNEL_NODE_PARAMS_v1 { func: f, shape, kernelParams: params, extra };
        return capture::add(s, |_| crate::graph::add::kernel(node.into())).map(|_| ());
    }
    let device = s.device();
    device.check()?;
    function.load()?;
    s.context().take_local(function.entry.local_bytes)?;
    if let Duration::Word(index) = function.duration {
        let index = index as usize;
        let (at, value) = (parameter(index, params, extra)?, parameter(index + 1, params, extra)?);
        return crate::stream_memory::run_until(s, at, value);
    }
    let op = shape.op(duration(function, params, extra)?, s.context().sm_count())?;
    s.submit_kernel(op, function.entry.lets_go, is_chained)
}

/// Whether a launch has `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`, and not as 0.
fn is_chained(config: &CUlaunchConfig) -> Result<bool> {
    /// `CUlaunchAttribute`, as far as it matters here.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Attribute {
        id: c_int,
        padding: c_int,
        value: [c_int; 16],
    }
    const SERIALIZATION: c_int = 6;
    let attributes = config.attrs.cast::<Attribute>();
    for at in 0..config.numAttrs as usize {
        let attribute = get(attributes.wrapping_add(at))?;
        if attribute.id == SERIALIZATION && attribute.value[0] != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(crate) fn run_kernel(kernel: &Kernel, s: &'static Stream) -> Result<()> {
    kernel.function.load()?;
    s.context().take_local(kernel.function.entry.local_bytes)?;
    s.submit(kernel.shape.op(kernel.ns, s.context().sm_count())?).map(|_| ())
}

exports_both! {
    fn cuLaunchKernel, cuLaunchKernel_ptsz(f: CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, _shared: c_uint, s: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void) |s| {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz] };
        launch(f, shape, s, params, extra, false)
    }

    fn cuLaunchKernelEx, cuLaunchKernelEx_ptsz(config: *const CUlaunchConfig, f: CUfunction, params: *mut *mut c_void, extra: *mut *mut c_void) |s, flavour| {
        let c = get(config)?;
        let shape = Shape {
            grid: [c.gridDimX, c.gridDimY, c.gridDimZ],
            block: [c.blockDimX, c.blockDimY, c.blockDimZ],
        };
        launch(f, shape, stream(c.hStream, flavour)?, params, extra, is_chained(&c)?)
    }

    fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(f: CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, _shared: c_uint, s: CUstream, params: *mut *mut c_void) |s| {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz] };
        launch(f, shape, s, params, std::ptr::null_mut(), false)
    }
}

fn launch_grid(f: CUfunction, width: c_int, height: c_int, s: CUstream) -> Result<()> {
    let function: &Function = resolve(f)?;
    let positive = |n: c_int| c_uint::try_from(n).map_err(|_| CUDA_ERROR_INVALID_VALUE);
    let shape = Shape { grid: [positive(width)?, positive(height)?, 1], block: [1; 3] };
    if let Duration::Parameter(_) | Duration::Word(_) = function.duration {
        // Neither cuParamSet* nor cuFuncSetBlockShape is simulated.
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let null = std::ptr::null_mut();
    launch(f, shape, stream(s, Flavour::Legacy)?, null, null, false)
}

exports! {
    // "Deprecated" since 11.3: one launch per device.
    fn cuLaunchCooperativeKernelMultiDevice(launches: *mut CUDA_LAUNCH_PARAMS, devices: c_uint, _flags: c_uint) {
        /// `CUDA_LAUNCH_PARAMS`.
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Launch {
            function: CUfunction,
            grid: [c_uint; 3],
            block: [c_uint; 3],
            shared: c_uint,
            stream: CUstream,
            params: *mut *mut c_void,
        }
        const _: () = assert!(size_of::<Launch>() == 56);
        current()?;
        if devices == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        for i in 0..devices as usize {
            let l: Launch = get(launches.cast::<Launch>().wrapping_add(i))?;
            let shape = Shape { grid: l.grid, block: l.block };
            launch(l.function, shape, stream(l.stream, Flavour::Legacy)?, l.params, std::ptr::null_mut(), false)?;
        }
        Ok(())
    }

    fn cuLaunch(f: CUfunction) { launch_grid(f, 1, 1, std::ptr::null_mut()) }
    fn cuLaunchGrid(f: CUfunction, width: c_int, height: c_int) {
        launch_grid(f, width, height, std::ptr::null_mut())
    }
    fn cuLaunchGridAsync(f: CUfunction, width: c_int, height: c_int, s: CUstream) {
        launch_grid(f, width, height, s)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(f: CUfunction, block_size: c_int, shared: usize) -> c_int {
        resolve::<Function>(f)?;
        if !(1..=1024).contains(&block_size) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let by_shared = c_int::try_from(SHARED_PER_SM / (shared + 1024)).unwrap_or(c_int::MAX);
        Ok((THREADS_PER_SM / block_size).min(BLOCKS_PER_SM).min(by_shared))
    }
}

const THREADS_PER_SM: c_int = 2048;
const BLOCKS_PER_SM: c_int = 32;
/// Shared memory of an SM and the most that one block may ask for (Hopper).
pub(crate) const SHARED_PER_SM: usize = 233_472;
pub(crate) const SHARED_OPT_IN: usize = 232_448;
