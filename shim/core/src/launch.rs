//! Launch hooks: through the gate, then to the driver. All variants share this body, because
//! nothing in a launch's arguments changes what the gate decides.

use crate::gate::{self, Busy, Stream};
use crate::graphs;
use crate::limits;
use crate::real::{self, Real};
use crate::state;
use core::ffi::c_int;
use core::sync::atomic::{AtomicUsize, Ordering};
use tessera_cuda::types::{CUDA_ERROR_NOT_FOUND, CUfunction, CUlaunchConfig, CUresult};

/// The hot path: the driver's function and, for a tenant, the right to call it while the flag is up. `None` says
/// nothing but "ask [`otherwise`]".
#[inline(always)]
pub fn at_once<F: Copy>(real: &Real<F>, stream: Stream) -> Option<(F, Option<Busy>)> {
    if limits::any_unpaid() {
        return None;
    }
    admitted_at_once(real, stream)
}

#[inline(always)]
fn admitted_at_once<F: Copy>(real: &Real<F>, stream: Stream) -> Option<(F, Option<Busy>)> {
    let function = real.bound()?;
    let busy = gate::admit_at_once(stream, true);
    (busy.is_some() || state::passes()).then_some((function, busy))
}

/// As [`at_once`], for graph launches: one that may take memory goes the other way.
#[inline(always)]
pub fn graph_at_once<F: Copy>(real: &Real<F>, stream: Stream) -> Option<(F, Option<Busy>)> {
    if graphs::any_with_memory() {
        return None;
    }
    admitted_at_once(real, stream)
}

/// Functions that were handed out and perhaps never launched, by their handle; of those that share a place the last.
static NEW: [AtomicUsize; 1024] = [const { AtomicUsize::new(0) }; 1024];

fn place(handle: usize) -> &'static AtomicUsize {
    // The multiplier of Fibonacci hashing, for the upper bits.
    &NEW[handle.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - 10)]
}

/// `handle` was handed out: of a function of one context, or of something else.
pub(crate) fn handed_out(handle: usize, is_function: bool) {
    let place = place(handle);
    if is_function {
        place.store(handle, Ordering::Relaxed);
    } else if place.load(Ordering::Relaxed) == handle {
        place.store(0, Ordering::Relaxed);
    }
}

/// Loads `kernel` if it is launched first: the launch would, which takes up to seconds and waits until all is complete
/// that is in flight, and no closing is to wait for that ("Module Management", `cuFuncLoad`).
#[inline]
fn load_first(kernel: CUfunction) {
    if place(kernel.addr()).load(Ordering::Relaxed) == kernel.addr() && !kernel.is_null() {
        load(kernel);
    }
}

#[cold]
#[inline(never)]
fn load(kernel: CUfunction) {
    place(kernel.addr()).store(0, Ordering::Relaxed);
    if !gate::is_bound() || gate::capture::any() {
        return; // nobody closes, or the driver is to decide what a capture minds
    }
    // SAFETY: a function that the driver has named, which the caller is about to launch; a place for the answer.
    let is_loaded = real::cuFuncIsLoaded.ask(1, |ask, state| unsafe { ask(state, kernel) });
    if is_loaded == Ok(0) {
        // SAFETY: as above.
        real::cuFuncLoad.tell(|load| unsafe { load(kernel) });
    }
}

/// Whether a kernel may begin before the one before it in its stream has ended ("Execution Control",
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`), if nothing is between the two.
///
/// # Safety
/// `config` is null or valid.
pub unsafe fn is_chained(config: *const CUlaunchConfig) -> bool {
    /// `CUlaunchAttribute`: 72 bytes, of which the first four are the attribute, and the value begins with the eighth.
    #[repr(C, align(8))]
    struct Attribute {
        id: c_int,
        value: [c_int; 17],
    }
    const _: () = assert!(size_of::<Attribute>() == 72);
    const SERIALIZATION: c_int = 6;
    // SAFETY: the caller's word, here and below.
    let Some(config) = (unsafe { config.as_ref() }) else { return false };
    let attributes = config.attrs.cast::<Attribute>();
    !attributes.is_null()
        && (0..config.numAttrs as usize).any(|at| {
            // SAFETY: as above.
            let attribute = unsafe { &*attributes.add(at) };
            attribute.id == SERIALIZATION && attribute.value[1] != 0
        })
}

/// Forwards any launch of `kernel`. `call` hands the caller's own arguments to the driver's function.
pub fn otherwise<F: Copy>(
    real: &Real<F>,
    kernel: CUfunction,
    stream: Stream,
    is_chained: bool,
    call: impl FnOnce(F) -> CUresult,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    if limits::any_unpaid()
        && let Err(refusal) = limits::launching(kernel, stream)
    {
        return refusal;
    }
    load_first(kernel);
    let kind = if is_chained { gate::Kind::Chained } else { gate::Kind::Launch };
    match gate::admit(kind, stream) {
        Ok(_pass) => call(function),
        Err(refusal) => refusal,
    }
}

/// Forwards a launch of several kernels into a stream each.
pub fn on_several<F: Copy>(
    real: &Real<F>,
    mut launches: impl Iterator<Item = (CUfunction, Stream)> + Clone,
    call: impl FnOnce(F) -> CUresult,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    let streams = launches.clone().map(|(_, stream)| stream);
    if limits::any_unpaid()
        && let Err(refusal) =
            launches.try_for_each(|(kernel, stream)| limits::launching(kernel, stream))
    {
        return refusal;
    }
    match gate::admit_several(streams) {
        Ok(_pass) => call(function),
        Err(refusal) => refusal,
    }
}
