//! A loop like a decoder's: every step launches the kernels of its layers, one by one or as a graph,
//! and waits for its result; the next follows at once.
//!
//! `{"do": "prepare", "mode": "eager"|"graphs", "requests": N}`, then `{"do": "measure", "begin": …,
//! "end": …}`. More requests in a batch make a step longer, but by less than their number: a token's
//! weights are read once for all.

use serde_json::json;

use super::kernel::{Amount, Event, Kernels};
use super::talk::{self, Window, percentile_us};
use crate::cuda::{Cuda, Graph, Stream};
use crate::exit::{CudaError, Exit};
use crate::report;

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
pub(super) fn run(cuda: Cuda, rounds_per_us: f64) -> Result<(), Exit> {
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
