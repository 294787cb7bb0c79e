//! `load`: loads on a GPU's time. What each does to its neighbours, and they to it, is for the judge
//! to read from the driver's own account; a tenant knows its own clock only.
//!
//! - a **backlog** ([`kinds::backlog`]): launches as fast as the driver takes them, without end;
//! - a **server** ([`kinds::serve`]): requests that arrive whether or not the last one is done;
//! - a **bursty load** ([`kinds::reclaim`]): idle for a while, then wants the GPU at once.

mod kinds;

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::Target;
use crate::args::Args;
use crate::cuda::{Cuda, Graph, Kernel, Stream};
use crate::exit::{CudaError, Exit};
use crate::stop::{self, Asked};

#[derive(Debug)]
pub struct Options {
    /// Durations of the kernels, in turn, nanoseconds.
    kernels: Vec<u64>,
    graph: bool,
    /// A backlog waits for its work after so many launches; 0: never.
    sync_every: u64,
    /// A backlog has a host function of so long after so many launches.
    host: Option<(usize, u64)>,
    /// A backlog that waits copies so much to the device before.
    copy: usize,
    /// A backlog waits in its stream for a word that nobody writes, from so long after its beginning on.
    stuck: Option<Duration>,
    /// A backlog begins with one launch in flight, for so long.
    shallow: Duration,
    /// Requests per second.
    rate: Option<f64>,
    /// A request follows the last at once, as steps of one answer do.
    closed: bool,
    /// Whether arrivals are exponentially distributed instead of evenly.
    poisson: bool,
    /// For a bursty load: how long it is busy, and idle on average.
    bursts: Option<(Duration, Duration)>,
    limit: Option<Duration>,
    /// What the driver's account is to call this process.
    name: Option<std::ffi::CString>,
}

impl Options {
    pub fn parse(mut args: Args) -> Result<Self, Exit> {
        let millis = |args: &mut Args, name| -> Result<Option<Duration>, Exit> {
            Ok(Some(args.number::<u64>(name, 0)?).filter(|&ms| ms > 0).map(Duration::from_millis))
        };
        let list = args.value("--kernel-us")?.unwrap_or_else(|| "1000".into());
        let kernels = list
            .split(',')
            .map(|us| us.parse::<u64>().ok()?.checked_mul(1000))
            .collect::<Option<Vec<u64>>>()
            .ok_or_else(|| Exit::usage(format!("--kernel-us: {list:?} is not microseconds")))?;
        let repeat = args.number::<usize>("--kernels", 1)?.max(1);
        let (burst, pause) = (millis(&mut args, "--burst-ms")?, millis(&mut args, "--pause-ms")?);
        let rate = args.number::<f64>("--rate", 0.0)?;
        let host =
            Some((args.number("--host-ms", 0)?, args.number::<u64>("--host-every", 4)?.max(1)));
        let name = args.value("--name")?.map(std::ffi::CString::new).transpose();
        let options = Self {
            name: name.map_err(|_| Exit::usage("--name has a NUL"))?,
            kernels: kernels.iter().copied().cycle().take(kernels.len() * repeat).collect(),
            graph: args.flag("--graph"),
            sync_every: args.number("--sync-every", 0)?,
            host: host.filter(|(ms, _)| *ms > 0),
            copy: args.number::<usize>("--copy-mib", 0)? << 20,
            stuck: millis(&mut args, "--stuck-after-ms")?,
            shallow: Duration::from_millis(args.number("--shallow-ms", 0)?),
            rate: (rate > 0.0).then_some(rate),
            closed: args.flag("--closed"),
            poisson: args.flag("--poisson"),
            bursts: burst.zip(pause),
            limit: args.limit()?,
        };
        args.finish()?;
        if !(0.0..=1e6).contains(&rate) {
            return Err(Exit::usage("--rate must be from 0 to 1000000 per second"));
        }
        if burst.is_some() != pause.is_some() {
            return Err(Exit::usage("a bursty load needs both --burst-ms and --pause-ms"));
        }
        let kinds = [options.bursts.is_some(), options.rate.is_some(), options.closed];
        if kinds.into_iter().filter(|&is| is).count() > 1 {
            return Err(Exit::usage(
                "--rate and --closed are for servers, --burst-ms for a bursty load",
            ));
        }
        Ok(options)
    }
}

pub fn run(target: Target, options: &Options) -> Result<(), Exit> {
    fine_timers();
    if let Some(name) = &options.name {
        // SAFETY: a NUL-terminated string, which the kernel copies; the process's name is its first thread's.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    }
    let cuda = Cuda::open(target)?;
    let work = Work::prepare(cuda, options)?;
    crate::report::line("ready", serde_json::json!({ "kernels": options.kernels.len() }));
    let clock = Clock::start(options.limit);
    if options.rate.is_some() || options.closed {
        kinds::serve(&work, options, clock)
    } else if let Some((burst, pause)) = options.bursts {
        kinds::reclaim(&work, burst, pause, clock)
    } else {
        kinds::backlog(&work, options, clock)
    }
}

/// Sleeps end on time: 50 µs late, as they do by default, would be half of what is measured.
fn fine_timers() {
    // SAFETY: PR_SET_TIMERSLACK takes one number.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

#[derive(Clone, Copy, Debug)]
struct Clock {
    start: Instant,
    limit: Option<Duration>,
}

impl Clock {
    fn start(limit: Option<Duration>) -> Self {
        Self { start: Instant::now(), limit }
    }

    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// What is asked of the process within `wait`; the end of its time is as good as being asked.
    fn asked(&self, wait: Duration) -> Option<Asked> {
        if self.limit.is_some_and(|limit| self.start.elapsed() >= limit) {
            return Some(Asked::Stop);
        }
        stop::wait(wait)
    }
}

/// Kernels of known durations, one by one or as a graph.
struct Work {
    cuda: Cuda,
    kernel: Kernel,
    graph: Option<Graph>,
    durations: Vec<u64>,
    stream: Stream,
    next: Cell<usize>,
}

impl Work {
    /// Loads the kernel, makes the stream, and captures the graph if there is to be one.
    fn prepare(cuda: Cuda, options: &Options) -> Result<Self, Exit> {
        let kernel = cuda.kernel()?;
        let stream = cuda.stream()?;
        let graph = match options.graph {
            true => Some(cuda.capture(&kernel, &options.kernels, stream)?),
            false => None,
        };
        let durations = options.kernels.clone();
        Ok(Self { cuda, kernel, graph, durations, stream, next: Cell::new(0) })
    }

    /// GPU time of one unit, nanoseconds.
    fn unit_ns(&self) -> u64 {
        self.durations.iter().sum()
    }

    /// Launches one call's worth: the graph, or the next kernel of the list.
    fn launch(&self) -> Result<(), CudaError> {
        let at = self.next.get();
        self.next.set(at.wrapping_add(1));
        match &self.graph {
            Some(graph) => self.cuda.launch_graph(graph, self.stream),
            None => {
                let duration = self.durations[at % self.durations.len()];
                self.cuda.launch(&self.kernel, duration, self.stream)
            }
        }
    }

    /// Launches one unit: the whole list.
    fn launch_unit(&self) -> Result<(), CudaError> {
        let calls = if self.graph.is_some() { 1 } else { self.durations.len() };
        (0..calls).try_for_each(|_| self.launch())
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.cuda.wait(&self.kernel, self.stream)
    }
}
