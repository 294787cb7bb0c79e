//! A backlog of equal units: how many are done between two moments, and when each ran by the GPU's
//! clock. Its neighbours on the GPU count likewise, so the parts add up.

use serde_json::json;

use super::kernel::{Amount, Kernels};
use super::page::Stamps;
use super::talk::{self, Window, percentile_us};
use crate::cuda::{Cuda, Event, Graph, Stream};
use crate::exit::{CudaError, Exit};
use crate::report;

/// A unit and where its stamps go.
#[derive(clap::Args, Debug)]
pub struct Options {
    #[arg(long, default_value_t = 200.0)]
    kernel_us: f64,
    /// Kernels of a graph; 0: no graph
    #[arg(long, default_value_t = 0)]
    graph: usize,
    /// Where to save stamps
    #[arg(long)]
    stamps: Option<String>,
}

impl Options {
    #[allow(clippy::cast_precision_loss, reason = "tens of kernels")]
    fn unit_us(&self) -> f64 {
        self.kernel_us * self.graph.max(1) as f64
    }
}

/// In flight are two batches of about this long.
const BATCH_US: f64 = 2000.0;

struct Backlog {
    kernels: Kernels,
    stream: Stream,
    amount: Amount,
    graph: Option<Graph>,
    stamps: Option<Stamps>,
    launched: u64,
}

/// How many units were done when.
pub(super) type Log = Vec<(u64, u64)>;

/// Measures at each request.
pub(super) fn run(cuda: Cuda, options: &Options, rounds_per_us: f64) -> Result<(), Exit> {
    let (kernels, stream) = (Kernels::load(cuda)?, cuda.stream()?);
    let amount = Amount::micros(options.kernel_us, rounds_per_us);
    let graph = match options.graph {
        0 => None,
        count => Some(kernels.graph(amount, count, stream)?),
    };
    // A graph's kernels would all have the same stamps.
    let stamps = match (&options.stamps, &graph) {
        (Some(_), None) => Stamps::new(cuda).ok(),
        _ => None,
    };
    let mut backlog = Backlog { kernels, stream, amount, graph, stamps, launched: 0 };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most hundreds")]
    let batch = (BATCH_US / options.unit_us()).clamp(1.0, 512.0) as u64;
    let events = [Event::new(cuda)?, Event::new(cuda)?];
    // Loads the kernels, so that nothing of that is measured.
    backlog.batch(batch, &events[0])?;
    events[0].wait()?;
    report::line("ready", json!({ "unit_us": options.unit_us(), "batch": batch }));
    while let Some(request) = talk::next() {
        let window = Window::of(&request);
        let log = backlog.fill(batch, &events, window)?;
        let saved = match (&backlog.stamps, &options.stamps) {
            (Some(stamps), Some(path)) => stamps.save(path)?,
            _ => 0,
        };
        let (from, to) = (done_at(&log, window.begin_ns), done_at(&log, window.end_ns));
        report::line(
            "measured",
            json!({
                "units": to - from,
                "seconds": window.seconds(),
                "unit_us": options.unit_us(),
                "longest_wait_ms": longest_wait_ms(&log, window),
                "stamps": saved,
            }),
        );
    }
    Ok(())
}

impl Backlog {
    /// Launches until the window is over; what was done when.
    fn fill(&mut self, batch: u64, events: &[Event; 2], window: Window) -> Result<Log, CudaError> {
        let mut log = vec![(talk::now_ns(), 0)];
        self.batch(batch, &events[0])?;
        let mut turn = 0;
        while !window.is_over() {
            self.batch(batch, &events[1 - turn])?;
            events[turn].wait()?;
            let done = log.last().map_or(0, |&(_, done)| done) + batch;
            log.push((talk::now_ns(), done));
            turn = 1 - turn;
        }
        events[turn].wait()?;
        Ok(log)
    }

    fn batch(&mut self, count: u64, then: &Event) -> Result<(), CudaError> {
        for _ in 0..count {
            match &self.graph {
                Some(graph) => self.kernels.cuda.launch_graph(graph, self.stream)?,
                None => {
                    let at = self.stamps.map_or(0, |stamps| stamps.of(self.launched));
                    self.kernels.launch(self.amount, at, self.stream)?;
                }
            }
            self.launched += 1;
        }
        then.record(self.stream)
    }
}

/// Units done at a moment, between two looks in proportion.
#[allow(clippy::cast_precision_loss, reason = "counts and durations of seconds")]
pub(super) fn done_at(log: &Log, at_ns: u64) -> f64 {
    let after = log.partition_point(|&(ns, _)| ns <= at_ns);
    let Some(&(before_ns, before)) = after.checked_sub(1).and_then(|i| log.get(i)) else {
        return 0.0;
    };
    let Some(&(after_ns, done)) = log.get(after) else { return before as f64 };
    let part = (at_ns - before_ns) as f64 / (after_ns - before_ns).max(1) as f64;
    before as f64 + part * (done - before) as f64
}

/// The longest time without a batch, milliseconds.
#[allow(clippy::cast_precision_loss, reason = "milliseconds for people")]
fn longest_wait_ms(log: &Log, window: Window) -> f64 {
    let inside = log.windows(2).filter(|two| window.contains(two[1].0));
    inside.map(|two| two[1].0 - two[0].0).max().unwrap_or(0) as f64 / 1e6
}

// A loop like a decoder's: every step launches the kernels of its layers, one by one or as a graph,
// and waits for its result; the next follows at once.
//
// `{"do": "prepare", "mode": "eager"|"graphs", "requests": N}`, then `{"do": "measure", "begin": …,
// "end": …}`. More requests in a batch make a step longer, but by less than their number: a token's
// weights are read once for all.

/// Kernels of a step, and how long each is with no request and for each more.
const KERNELS: usize = 48;
const FIXED_US: f64 = 12.0;
const EACH_US: f64 = 0.4;

struct Step {
    kernels: Kernels,
    stream: Stream,
    done: Event,
    amount: Amount,
    graph: Option<Graph>,
}

impl Step {
    fn run(&self) -> Result<(), CudaError> {
        match &self.graph {
            Some(graph) => self.kernels.cuda.launch_graph(graph, self.stream)?,
            None => {
                (0..KERNELS).try_for_each(|_| self.kernels.launch(self.amount, 0, self.stream))?;
            }
        }
        self.done.record(self.stream)?;
        self.done.wait()
    }
}

/// Serves the suite's requests.
pub(super) fn run_steps(cuda: Cuda, rounds_per_us: f64) -> Result<(), Exit> {
    let (kernels, stream, done) = (Kernels::load(cuda)?, cuda.stream()?, Event::new(cuda)?);
    report::line("ready", json!({ "kernels": KERNELS }));
    let (mut step, mut requests) = (None, 0);
    while let Some(request) = talk::next() {
        if request["do"] == "prepare" {
            requests = request["requests"].as_u64().unwrap_or(1);
            #[allow(clippy::cast_precision_loss, reason = "tens of requests")]
            let us = FIXED_US + EACH_US * requests as f64;
            let amount = Amount::micros(us, rounds_per_us);
            let graph = match request["mode"] == "graphs" {
                true => Some(kernels.graph(amount, KERNELS, stream)?),
                false => None,
            };
            let made = Step { kernels, stream, done, amount, graph };
            (0..3).try_for_each(|_| made.run())?;
            step = Some(made);
            report::line("prepared", json!({}));
        } else if let Some(step) = &step {
            measure(step, requests, Window::of(&request))?;
        } else {
            return Err(Exit::usage("measure comes after prepare"));
        }
    }
    Ok(())
}

/// Steps through the window and says what they took.
#[allow(clippy::cast_precision_loss, reason = "counts of seconds")]
fn measure(step: &Step, requests: u64, window: Window) -> Result<(), Exit> {
    let (mut took, mut last) = (Vec::new(), talk::now_ns());
    while !window.is_over() {
        step.run()?;
        let now = talk::now_ns();
        if window.contains(now) {
            took.push(now - last);
        }
        last = now;
    }
    let steps = took.len();
    took.sort_unstable();
    report::line(
        "measured",
        json!({
            "steps": steps,
            "tokens_per_s": steps as f64 * requests as f64 / window.seconds(),
            "p50_us": percentile_us(&took, 500),
            "p99_us": percentile_us(&took, 990),
            "max_us": percentile_us(&took, 1000),
        }),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_between_two_looks_are_in_proportion() {
        let log = vec![(100, 0), (200, 10), (300, 20)];
        assert!((done_at(&log, 150) - 5.0).abs() < 1e-9);
        assert!((done_at(&log, 200) - 10.0).abs() < 1e-9);
        assert!((done_at(&log, 999) - 20.0).abs() < 1e-9);
        assert!(done_at(&log, 50).abs() < 1e-9);
    }
}
