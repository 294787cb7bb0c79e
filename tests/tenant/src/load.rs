//! `load`: loads on a GPU's time. What each does to its neighbours, and they to it, is for the judge
//! to read from the driver's own account; a tenant knows its own clock only.
//!
//! - a **backlog** ([`backlog`]): launches as fast as the driver takes them, without end;
//! - a **server** ([`serve`]): requests from outside, or steps of its own that follow each other.

use std::cell::Cell;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::args;
use crate::cuda::{Cuda, Graph, Kernel, Stream};
use crate::exit::{CudaError, Exit};
use crate::memory::linear;
use crate::serve::{self, Pace};
use crate::stop::{self, Asked};
use crate::{Device, report};

#[derive(clap::Args, Debug)]
pub struct Options {
    /// Durations of the kernels, in turn
    #[arg(long, value_delimiter = ',', default_value = "1000")]
    kernel_us: Vec<u64>,
    /// The list so many times each round
    #[arg(long, default_value_t = 1)]
    kernels: usize,
    /// All kernels of a round as one graph
    #[arg(long)]
    graph: bool,
    /// A backlog waits for its work after so many launches; 0: never
    #[arg(long, default_value_t = 0)]
    sync_every: u64,
    /// A backlog has a host function of so many milliseconds after every fourth launch
    #[arg(long)]
    host_ms: Option<usize>,
    /// A backlog that waits copies so much to the device before
    #[arg(long, default_value_t = 0)]
    copy_mib: usize,
    /// A backlog waits in its stream for a word that nobody writes, from so long after its beginning on
    #[arg(long)]
    stuck_after_ms: Option<u64>,
    /// A backlog begins with one launch in flight, for so long
    #[arg(long, default_value_t = 0)]
    shallow_ms: u64,
    /// Requests per second arrive
    #[arg(long, value_parser = args::rate, conflicts_with = "closed")]
    rate: Option<f64>,
    /// A request follows the last at once, as steps of one answer do
    #[arg(long)]
    closed: bool,
    /// After a pause of half as much to one and a half
    #[arg(long, default_value_t = 0)]
    pause_ms: u64,
    /// Arrivals are exponentially distributed instead of evenly
    #[arg(long)]
    poisson: bool,
    /// Seconds; 0: until SIGTERM
    #[arg(long = "for", value_parser = args::limit, default_value = "0")]
    limit: Duration,
}

pub fn run(device: Device, options: &Options) -> Result<(), Exit> {
    fine_timers();
    let cuda = Cuda::open(device)?;
    let work = Work::prepare(cuda, options)?;
    report::line("ready", json!({ "kernels": work.durations.len() }));
    let pace = match options.rate.filter(|rate| *rate > 0.0) {
        Some(rate) => Pace::Arriving { rate, poisson: options.poisson },
        None if options.closed => {
            Pace::Following { pause: Duration::from_millis(options.pause_ms) }
        }
        None => return backlog(&work, options),
    };
    let step = || -> Result<(), Exit> {
        work.launch_unit()?;
        Ok(work.wait()?)
    };
    serve::serve(pace, options.limit, 0, |_, _| step()).map(drop)
}

/// Sleeps end on time: 50 µs late, as they do by default, would be half of what is measured.
fn fine_timers() {
    // SAFETY: PR_SET_TIMERSLACK takes one number.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
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
        let us = &options.kernel_us;
        let round = us.iter().map(|us| us.saturating_mul(1000)).cycle();
        let durations: Vec<u64> = round.take(us.len() * options.kernels.max(1)).collect();
        let graph = match options.graph {
            true => Some(cuda.capture(&kernel, &durations, stream)?),
            false => None,
        };
        Ok(Self { cuda, kernel, graph, durations, stream, next: Cell::new(0) })
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

/// Launches of a backlog for each of its host functions.
const HOST_EVERY: u64 = 4;
/// Launches between two looks whether to stop.
const LOOK_EVERY: u64 = 16;

/// A tenant that always has more to do: launches until asked to stop. What is queued then is left behind, as by a killed program.
fn backlog(work: &Work, options: &Options) -> Result<(), Exit> {
    let start = Instant::now();
    let mut stuck = options.stuck_after_ms.map(Duration::from_millis);
    let (mut launched, mut is_shallow) = (0u64, true);
    let shallow = Duration::from_millis(options.shallow_ms);
    let copied = vec![1; options.copy_mib << 20];
    let room = if copied.is_empty() { 0 } else { linear::plain(&work.cuda, copied.len())? };
    loop {
        let passed = start.elapsed();
        let is_over = || passed >= options.limit || stop::poll() == Some(Asked::Stop);
        if launched.is_multiple_of(LOOK_EVERY) && is_over() {
            let seconds = passed.as_secs_f64();
            report::line("done", json!({ "seconds": seconds, "launched": launched }));
            return Ok(());
        }
        is_shallow = is_shallow && passed < shallow;
        work.launch()?;
        launched += 1;
        let is_due = options.sync_every > 0 && launched.is_multiple_of(options.sync_every);
        if stuck.is_some_and(|after| start.elapsed() >= after) {
            stuck = None;
            is_shallow = false;
            work.cuda.wait_for_ever(work.stream)?;
        }
        if let Some(ms) = options.host_ms
            && launched.is_multiple_of(HOST_EVERY)
        {
            work.cuda.sleep_on_host(ms, work.stream)?;
        }
        if is_due && !copied.is_empty() {
            linear::write(&work.cuda, room, &copied)?;
        }
        if is_due || is_shallow {
            work.wait()?;
        }
    }
}
