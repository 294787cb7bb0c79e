//! `greedy`: take all memory there is, by every API, and keep asking for more.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Device;
use crate::args;
use crate::cuda::{Cuda, Stream};
use crate::exit::{self, Exit};
use crate::memory::{Api, Block};
use crate::processes;
use crate::report;
use crate::stop::{self, Asked};

#[derive(clap::Args, Debug)]
pub struct Options {
    #[arg(long, value_parser = args::bytes, default_value = "64Mi")]
    chunk: u64,
    /// What is refused is asked for in halves, down to this
    #[arg(long, value_parser = args::bytes, default_value = "1Mi")]
    min_chunk: u64,
    #[arg(long, value_delimiter = ',')]
    apis: Vec<Api>,
    /// Safety where no quota holds: no more than this is taken
    #[arg(long, value_parser = args::bytes)]
    at_most: Option<u64>,
    /// Holds so many seconds; 0: until SIGTERM
    #[arg(long = "for", value_parser = args::limit)]
    hold: Option<Duration>,
    #[arg(long, default_value_t = 50)]
    retry_ms: u64,
}

impl Options {
    fn retry(&self) -> Duration {
        Duration::from_millis(self.retry_ms)
    }
}

#[derive(Clone, Copy, Default)]
struct Tally {
    attempts: u64,
    refused: u64,
    held: u64,
}

struct Greed<'a> {
    cuda: Cuda,
    stream: Stream,
    options: &'a Options,
    blocks: Vec<Block>,
    tally: BTreeMap<&'static str, Tally>,
    held: u64,
}

impl Greed<'_> {
    /// Asks once; `Ok(true)` where it was granted.
    fn ask(&mut self, api: Api, bytes: u64) -> Result<bool, Exit> {
        if self.options.at_most.is_some_and(|most| self.held + bytes > most) {
            self.report("exceeded");
            return Err(Exit::new(
                exit::EXCEEDED,
                format!("{} bytes held and still no refusal", self.held),
            ));
        }
        let tally = self.tally.entry(api.into_str()).or_default();
        tally.attempts += 1;
        match self.cuda.allocate(api, bytes, self.stream) {
            Ok(block) => {
                tally.held += block.bytes;
                self.held += block.bytes;
                // Memory that is never touched need not exist.
                self.cuda.write(&block, block.bytes.saturating_sub(64), &[0x5a; 64])?;
                self.blocks.push(block);
                Ok(true)
            }
            Err(error) if error.is_out_of_memory() => {
                tally.refused += 1;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn report(&self, event: &str) {
        let apis: BTreeMap<&str, Value> = self
            .tally
            .iter()
            .map(|(name, t)| {
                (*name, json!({ "attempts": t.attempts, "refused": t.refused, "held": t.held }))
            })
            .collect();
        let sum = |f: fn(&Tally) -> u64| self.tally.values().map(f).sum::<u64>();
        report::line(
            event,
            json!({
                "held": self.held,
                "attempts": sum(|t| t.attempts),
                "refused": sum(|t| t.refused),
                "apis": apis,
            }),
        );
    }
}

/// Exits 0 when memory ran out, however much there was; [`exit::EXCEEDED`] where `--at-most`
/// bytes were granted.
pub fn run(device: Device, options: &Options) -> Result<(), Exit> {
    let cuda = open(device, options)?;
    let Some(cuda) = cuda else { return Ok(()) };
    let mut greed = Greed {
        cuda,
        stream: cuda.stream()?,
        options,
        blocks: Vec::new(),
        tally: BTreeMap::new(),
        held: 0,
    };
    // Equal parts by every API, then smaller and smaller ones, so that the limit is met exactly.
    let mut chunk = options.chunk;
    let least = options.min_chunk.min(chunk).max(1);
    while chunk >= least {
        let mut granted = false;
        for &api in args::or_all(&options.apis) {
            granted |= greed.ask(api, chunk)?;
        }
        if !granted {
            chunk /= 2;
        }
        if stop::poll() == Some(Asked::Stop) {
            break;
        }
    }
    greed.report("full");
    if let Some(hold) = options.hold {
        keep_asking(&mut greed, hold)?;
    }
    let (free, total) = cuda.mem_info()?;
    let blocks = std::mem::take(&mut greed.blocks);
    for block in &blocks {
        cuda.free(block, greed.stream)?;
    }
    report::line("view", json!({ "free_when_full": free, "total": total }));
    greed.report("done");
    cuda.close()?;
    Ok(())
}

/// A context, once all copies have tried to get one. Refused one, it asks again as long as it would
/// hold: `None` where it never got any.
fn open(device: Device, options: &Options) -> Result<Option<Cuda>, Exit> {
    let start = Instant::now();
    let mut attempts = 0u64;
    let tell = |event: &str, attempts: u64| {
        let tries = json!({ "attempts": attempts, "refused": attempts, "held": 0 });
        report::line(
            event,
            json!({
                "held": 0, "attempts": attempts, "refused": attempts, "apis": { "context": tries },
            }),
        );
    };
    loop {
        let opened = Cuda::open(device);
        if attempts == 0 {
            processes::muster();
        }
        match opened {
            Ok(cuda) => return Ok(Some(cuda)),
            Err(exit) if exit.code == exit::OUT_OF_MEMORY => attempts += 1,
            Err(exit) => return Err(exit),
        }
        if attempts == 1 {
            tell("full", attempts);
        }
        let over = options.hold.is_none_or(|hold| start.elapsed() >= hold);
        if over || stop::wait(options.retry()) == Some(Asked::Stop) {
            tell("done", attempts);
            return Ok(None);
        }
    }
}

fn keep_asking(greed: &mut Greed<'_>, hold: Duration) -> Result<(), Exit> {
    let start = Instant::now();
    let mut reported = start;
    let mut turn = 0usize;
    while start.elapsed() < hold {
        if stop::wait(greed.options.retry()) == Some(Asked::Stop) {
            break;
        }
        let apis = args::or_all(&greed.options.apis);
        let api = apis[turn % apis.len()];
        turn += 1;
        greed.ask(api, greed.options.chunk)?;
        if reported.elapsed() >= Duration::from_secs(1) {
            greed.report("progress");
            reported = Instant::now();
        }
    }
    Ok(())
}
