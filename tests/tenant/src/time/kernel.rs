//! A kernel with a fixed amount of work, for every thread that the GPU can hold.
//!
//! A kernel that spins until a clock says enough has its time passed for it while others run: it
//! would say that sharing costs nothing. This one counts. The simulated driver gives a kernel of its
//! name the nanoseconds of its first parameter, which the kernel itself ignores.

use std::ffi::{CStr, c_int};
use std::time::{Duration, Instant};

use serde_json::json;
use tessera_cuda::types::{CUdeviceptr, CUfunction};

use crate::cuda::{Cuda, Event, Graph, Stream, made};
use crate::driver::call;
use crate::exit::{CudaError, Exit};
use crate::report;

/// `fixed_work(ns, rounds, stamps)`: eight dependent multiply-adds a round; then its first thread
/// writes when the kernel began and ended, by the GPU's clock, where there is room for stamps.
/// `exchange(ns, mine, peer, step)`: writes `step` to the one word and waits for it in the other. After two
/// seconds it gives up, and writes `step` two words behind its own: nothing spins on a GPU for ever.
const PTX: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry fixed_work(.param .u64 ns, .param .u64 rounds, .param .u64 stamps)
{
    .reg .pred %p<5>;
    .reg .b64 %rd<8>;
    .reg .b32 %r<4>;
    .reg .f32 %f<4>;
    mov.u64 %rd3, %globaltimer;
    ld.param.u64 %rd1, [rounds];
    ld.param.u64 %rd2, [stamps];
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f3F7FFF00;
AGAIN:
    setp.eq.u64 %p1, %rd1, 0;
    @%p1 bra DONE;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    sub.u64 %rd1, %rd1, 1;
    bra AGAIN;
DONE:
    // Never so; but for it the work could be left out.
    setp.lt.f32 %p4, %f1, 0f00000000;
    @%p4 trap;
    setp.eq.u64 %p2, %rd2, 0;
    @%p2 bra END;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    or.b32 %r3, %r1, %r2;
    setp.ne.u32 %p3, %r3, 0;
    @%p3 bra END;
    mov.u64 %rd4, %globaltimer;
    st.global.u64 [%rd2], %rd3;
    st.global.u64 [%rd2+8], %rd4;
END:
    ret;
}
.visible .entry exchange(.param .u64 ns, .param .u64 mine, .param .u64 peer, .param .u64 step)
{
    .reg .pred %p<3>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [mine];
    ld.param.u64 %rd2, [peer];
    ld.param.u64 %rd3, [step];
    membar.sys;
    st.volatile.global.u64 [%rd1], %rd3;
    mov.u64 %rd4, %globaltimer;
AGAIN:
    ld.volatile.global.u64 %rd5, [%rd2];
    setp.ge.u64 %p1, %rd5, %rd3;
    @%p1 bra END;
    mov.u64 %rd6, %globaltimer;
    sub.u64 %rd7, %rd6, %rd4;
    setp.lt.u64 %p2, %rd7, 2000000000;
    @%p2 bra AGAIN;
    st.volatile.global.u64 [%rd1+16], %rd3;
END:
    membar.sys;
    ret;
}
";

const THREADS: u32 = 256;
/// `CU_DEVICE_ATTRIBUTE_…`.
const MULTIPROCESSORS: c_int = 16;
const THREADS_EACH: c_int = 39;

#[derive(Clone, Copy, Debug)]
pub(super) struct Amount {
    ns: u64,
    rounds: u64,
}

impl Amount {
    /// So many microseconds of the whole GPU.
    pub fn micros(us: f64, rounds_per_us: f64) -> Self {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
        let whole = |value: f64| value.max(0.0).round() as u64;
        Self { ns: whole(us * 1000.0), rounds: whole(us * rounds_per_us) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Kernels {
    pub cuda: Cuda,
    work: CUfunction,
    exchange: CUfunction,
    blocks: u32,
}

/// An attribute of the device; 0 where the driver does not know it.
fn attribute(cuda: &Cuda, which: c_int) -> u32 {
    // SAFETY: a live out-parameter.
    made(|at| unsafe { call!(cuda.driver, device_attribute(at, which, cuda.device)) })
        .map_or(0, |value: c_int| u32::try_from(value).unwrap_or(0))
}

impl Kernels {
    pub fn load(cuda: Cuda) -> Result<Self, CudaError> {
        let [work, exchange] = cuda.functions(PTX, [c"fixed_work", c"exchange"])?;
        let full = attribute(&cuda, MULTIPROCESSORS) * attribute(&cuda, THREADS_EACH) / THREADS;
        Ok(Self { cuda, work, exchange, blocks: full.max(1) })
    }

    /// Launches the work; the stamps' address, or 0.
    pub fn launch(
        &self,
        Amount { ns, rounds }: Amount,
        stamps: CUdeviceptr,
        stream: Stream,
    ) -> Result<(), CudaError> {
        let shape = (self.blocks, THREADS);
        self.cuda.launch_with(self.work, shape, [ns, rounds, stamps], stream)
    }

    pub fn exchange(
        &self,
        [mine, peer]: [CUdeviceptr; 2],
        step: u64,
        stream: Stream,
    ) -> Result<(), CudaError> {
        self.cuda.launch_with(self.exchange, (1, 1), [0, mine, peer, step], stream)
    }

    pub fn graph(&self, amount: Amount, count: usize, stream: Stream) -> Result<Graph, CudaError> {
        self.cuda
            .capture_with(stream, || (0..count).try_for_each(|_| self.launch(amount, 0, stream)))
    }
}

/// Launches for which the time is taken, after as many that warm the clocks up.
const LAUNCHES: u32 = 100;
const WARM_UP: Duration = Duration::from_millis(300);

/// Prints how many rounds are a microsecond.
pub(super) fn calibrate(cuda: Cuda) -> Result<(), Exit> {
    let (kernels, stream, event) = (Kernels::load(cuda)?, cuda.stream()?, Event::new(cuda)?);
    let timed = |amount, launches: u32| -> Result<f64, CudaError> {
        let start = Instant::now();
        (0..launches).try_for_each(|_| kernels.launch(amount, 0, stream))?;
        event.record(stream)?;
        event.wait()?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(launches))
    };
    // The second knows about how long a launch is, the first but guesses.
    let mut rounds_per_us = 100.0;
    for _ in 0..2 {
        let amount = Amount::micros(1000.0, rounds_per_us);
        let start = Instant::now();
        while start.elapsed() < WARM_UP {
            timed(amount, 10)?;
        }
        rounds_per_us *= 1000.0 / timed(amount, LAUNCHES)?;
    }
    report::line("calibrated", json!({ "rounds_per_us": rounds_per_us, "blocks": kernels.blocks }));
    Ok(())
}
