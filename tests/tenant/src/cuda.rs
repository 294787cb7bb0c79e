//! The driver with a context: the few calls a tenant needs, with checked results.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr::null_mut;

use tessera_cuda::types::{
    CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUcontext, CUdevice, CUevent, CUfunction, CUgraphExec,
    CUresult, CUstream, CUuuid,
};

use crate::Device;
use crate::driver::{Driver, call};
use crate::exit::{self, CudaError, Exit};
use crate::memory::OwnPool;

/// A kernel that keeps the GPU busy for the nanoseconds of its parameter, by `%globaltimer`; the
/// simulated driver gives a kernel of this name the same duration.
const PTX: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin_ns(.param .u64 spin_ns_param_0)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [spin_ns_param_0];
    mov.u64 %rd2, %globaltimer;
LOOP:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra LOOP;
    ret;
}
";

/// `CU_STREAM_NON_BLOCKING`.
const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: wait without burning the CPU.
const EVENT_WAIT: c_uint = 1 | 2;

/// A stream of the context that made it, or the legacy default stream.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub(crate) CUstream);

impl Stream {
    /// `CU_STREAM_LEGACY` by its usual spelling, null.
    pub const LEGACY: Self = Self(null_mut());
}

/// A device with its primary context retained, current in the thread that opened it.
#[derive(Clone, Copy)]
pub struct Cuda {
    /// For the life of the process, so that this can be copied to every thread.
    pub(crate) driver: &'static Driver,
    pub(crate) own_pool: &'static OwnPool,
    pub(crate) device: CUdevice,
    context: CUcontext,
}

// SAFETY: contexts, and the functions of the driver API, may be used from any thread
// (CUDA C Programming Guide, "Driver API": a context is current per thread).
unsafe impl Send for Cuda {}
// SAFETY: as above; `Cuda` itself has no interior mutability.
unsafe impl Sync for Cuda {}

pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(CudaError { call, code }) }
}

/// The answer that a call puts where it is told to.
pub(crate) fn made<T: Default>(
    call: impl FnOnce(*mut T) -> Result<(), CudaError>,
) -> Result<T, CudaError> {
    let mut answer = T::default();
    call(&raw mut answer)?;
    Ok(answer)
}

/// `cuInit` on a freshly loaded driver.
pub fn initialise() -> Result<Driver, Exit> {
    let driver = Driver::load()?;
    // SAFETY: cuInit takes flags only, which must be 0.
    unsafe { call!(driver, init(0)) }?;
    Ok(driver)
}

impl Cuda {
    /// Loads the driver, initialises it and retains the device's primary context.
    pub fn open(device: Device) -> Result<Self, Exit> {
        let driver = initialise()?;
        let ordinal = match device {
            Device::Ordinal(ordinal) => ordinal,
            Device::Uuid(uuid) => find(&driver, uuid)?,
        };
        Ok(Self::on(driver, ordinal)?)
    }

    /// Retains the primary context of `ordinal` and makes it current.
    pub fn on(driver: Driver, ordinal: i32) -> Result<Self, CudaError> {
        let mut device = 0;
        let mut context = null_mut();
        // SAFETY: live out-parameters.
        unsafe {
            call!(driver, device_get(&raw mut device, ordinal))?;
            call!(driver, primary_retain(&raw mut context, device))?;
        }
        let (driver, own_pool) = (Box::leak(Box::new(driver)), Box::leak(Box::default()));
        let cuda = Self { driver, own_pool, device, context };
        cuda.bind()?;
        Ok(cuda)
    }

    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context was retained and is released by nobody but `close`.
        unsafe { call!(self.driver, ctx_set_current(self.context)) }
    }

    pub fn close(self) -> Result<(), CudaError> {
        // SAFETY: retained once by `on`.
        unsafe { call!(self.driver, primary_release(self.device)) }
    }

    /// Free and total bytes as `cuMemGetInfo` shows them.
    pub fn mem_info(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: live out-parameters.
        unsafe { call!(self.driver, mem_get_info(&raw mut free, &raw mut total)) }?;
        Ok((free as u64, total as u64))
    }

    pub fn synchronise(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: a `Stream` is null or made by the driver.
        unsafe { call!(self.driver, stream_synchronize(stream.0)) }
    }

    /// A stream that does not wait for the legacy default stream.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        // SAFETY: a live out-parameter.
        made(|at| unsafe { call!(self.driver, stream_create(at, STREAM_NON_BLOCKING)) }).map(Stream)
    }

    /// Functions of a module of their own.
    pub(crate) fn functions<const N: usize>(
        &self,
        ptx: &CStr,
        names: [&CStr; N],
    ) -> Result<[CUfunction; N], CudaError> {
        let (mut module, mut functions) = (null_mut(), [null_mut(); N]);
        // SAFETY: NUL-terminated PTX and names; live out-parameters.
        unsafe {
            call!(self.driver, module_load_data(&raw mut module, ptx.as_ptr().cast()))?;
            for (function, name) in functions.iter_mut().zip(names) {
                call!(self.driver, module_get_function(function, module, name.as_ptr()))?;
            }
        }
        Ok(functions)
    }

    /// Launches so many blocks of so many threads of a function, all of whose parameters are numbers of eight bytes.
    pub(crate) fn launch_with<const N: usize>(
        &self,
        function: CUfunction,
        (blocks, threads): (u32, u32),
        mut numbers: [u64; N],
        stream: Stream,
    ) -> Result<(), CudaError> {
        let mut params = numbers.each_mut().map(|number| std::ptr::from_mut(number).cast());
        let (params, extra) = (params.as_mut_ptr(), null_mut());
        // SAFETY: as many parameters of eight bytes as the PTX declares; the driver copies them before it returns.
        unsafe {
            call!(
                self.driver,
                launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, stream.0, params, extra)
            )
        }
    }

    pub fn kernel(&self) -> Result<Kernel, CudaError> {
        let [function] = self.functions(PTX, [c"spin_ns"])?;
        Ok(Kernel { function, done: Event::new(*self)? })
    }

    pub fn launch(&self, kernel: &Kernel, ns: u64, stream: Stream) -> Result<(), CudaError> {
        self.launch_with(kernel.function, (1, 32), [ns], stream)
    }

    pub fn wait(&self, kernel: &Kernel, stream: Stream) -> Result<(), CudaError> {
        kernel.done.record(stream)?;
        kernel.done.wait()
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Event {
    cuda: Cuda,
    event: CUevent,
}

impl Event {
    /// One without timing, whose waiters sleep.
    pub fn new(cuda: Cuda) -> Result<Self, CudaError> {
        // SAFETY: a live out-parameter.
        let event = made(|at| unsafe { call!(cuda.driver, event_create(at, EVENT_WAIT)) })?;
        Ok(Self { cuda, event })
    }

    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: event and stream are of this context and live as long as the process.
        unsafe { call!(self.cuda.driver, event_record(self.event, stream.0)) }
    }

    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { call!(self.cuda.driver, event_synchronize(self.event)) }
    }

    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: as above.
        match unsafe { call!(self.cuda.driver, event_query(self.event)) } {
            Ok(()) => Ok(true),
            Err(error) if error.code == CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// What is in a stream and is no work of the GPU.
impl Cuda {
    /// A host function that sleeps for so many milliseconds.
    pub fn sleep_on_host(&self, ms: usize, stream: Stream) -> Result<(), CudaError> {
        unsafe extern "C" fn sleep(ms: *mut c_void) {
            std::thread::sleep(std::time::Duration::from_millis(ms.addr() as u64));
        }
        // SAFETY: the argument is a number, which the function takes for one.
        unsafe {
            call!(
                self.driver,
                launch_host_func(stream.0, Some(sleep), std::ptr::without_provenance_mut(ms))
            )
        }
    }

    pub fn wait_for_ever(&self, stream: Stream) -> Result<(), CudaError> {
        /// `CU_STREAM_WAIT_VALUE_GEQ`
        const GEQ: c_uint = 0;
        let mut word = 0;
        // SAFETY: a live out-parameter; then a word on the device that is never freed.
        unsafe {
            call!(self.driver, mem_alloc(&raw mut word, 8))?;
            call!(self.driver, wait_value(stream.0, word, i64::MAX.cast_unsigned(), GEQ))
        }
    }
}

/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
const CAPTURE_THREAD_LOCAL: i32 = 1;

/// Kernels as one unit.
#[derive(Debug)]
pub struct Graph(CUgraphExec);

impl Cuda {
    /// Captures one launch of the busy kernel for each of `durations` (nanoseconds), as frameworks
    /// make their graphs.
    pub fn capture(
        &self,
        kernel: &Kernel,
        durations: &[u64],
        stream: Stream,
    ) -> Result<Graph, CudaError> {
        self.capture_with(stream, || {
            durations.iter().try_for_each(|&ns| self.launch(kernel, ns, stream))
        })
    }

    /// Captures what `launches` puts into `stream`.
    pub fn capture_with(
        &self,
        stream: Stream,
        launches: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: a stream of this context, which nobody else uses yet.
        unsafe { call!(self.driver, stream_begin_capture(stream.0, CAPTURE_THREAD_LOCAL)) }?;
        let launched = launches();
        // SAFETY: the stream is capturing, live out-parameters; the graph lives as long as the process.
        unsafe {
            call!(self.driver, stream_end_capture(stream.0, &raw mut graph))?;
            launched?;
            call!(self.driver, graph_instantiate(&raw mut exec, graph, 0))?;
        }
        Ok(Graph(exec))
    }

    pub fn launch_graph(&self, graph: &Graph, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: instantiated by `capture` and never destroyed.
        unsafe { call!(self.driver, graph_launch(graph.0, stream.0)) }
    }
}

/// The busy kernel, with the event its waiter sleeps on.
pub struct Kernel {
    function: CUfunction,
    done: Event,
}

/// The ordinal of the device with this UUID.
fn find(driver: &Driver, wanted: [u8; 16]) -> Result<i32, Exit> {
    for ordinal in 0..device_count(driver)? {
        let mut device = 0;
        let mut uuid = CUuuid::default();
        // SAFETY: live out-parameters.
        unsafe {
            call!(driver, device_get(&raw mut device, ordinal))?;
            call!(driver, device_uuid(&raw mut uuid, device))?;
        }
        if uuid.bytes == wanted {
            return Ok(ordinal);
        }
    }
    Err(Exit::new(exit::DRIVER, "the driver shows no device of that UUID"))
}

pub fn device_count(driver: &Driver) -> Result<i32, CudaError> {
    // SAFETY: a live out-parameter.
    made(|at| unsafe { call!(driver, device_count(at)) })
}

/// The CUDA version that the driver speaks (12040 is 12.4).
pub fn version(driver: &Driver) -> Result<i32, CudaError> {
    // SAFETY: a live out-parameter.
    made(|at| unsafe { call!(driver, driver_version(at)) })
}

/// UUID (as NVML prints it), name, and total bytes of the device at `ordinal`.
pub fn describe(driver: &Driver, ordinal: i32) -> Result<(String, String, u64), CudaError> {
    let mut device = 0;
    let mut uuid = CUuuid::default();
    let mut name = [0u8; 128];
    let mut total = 0usize;
    // SAFETY: live out-parameters; the name's length is passed with it.
    unsafe {
        call!(driver, device_get(&raw mut device, ordinal))?;
        call!(driver, device_uuid(&raw mut uuid, device))?;
        call!(driver, device_name(name.as_mut_ptr().cast::<c_char>(), 127, device))?;
        call!(driver, device_total_mem(&raw mut total, device))?;
    }
    let name = CStr::from_bytes_until_nul(&name)
        .map_or_else(|_| String::new(), |n| n.to_string_lossy().into_owned());
    Ok((format_uuid(uuid), name, total as u64))
}

fn format_uuid(uuid: CUuuid) -> String {
    let hex: String = uuid.bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
