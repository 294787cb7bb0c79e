//! `hold`: allocate, say so, and keep it.

use std::time::Duration;

use serde_json::json;

use crate::Device;
use crate::args;
use crate::cuda::{Cuda, Stream};
use crate::exit::{self, Exit};
use crate::memory::Api;
use crate::report;
use crate::stop;

/// Bytes of the pattern at both ends of the allocation.
const PROBE: usize = 256;

#[derive(clap::Args, Debug)]
pub struct Options {
    /// How much; 0 for a context alone
    #[arg(long, value_parser = args::bytes)]
    bytes: u64,
    /// Seconds; 0: until SIGTERM
    #[arg(long = "for", value_parser = args::limit, default_value = "0")]
    limit: Duration,
}

/// Holds until asked to stop, then checks that the data is what was written.
pub fn run(device: Device, options: &Options) -> Result<(), Exit> {
    if (1..PROBE as u64).contains(&options.bytes) {
        let usage = format!("--bytes must be 0, for a context alone, or at least {PROBE}");
        return Err(Exit::usage(usage));
    }
    let cuda = Cuda::open(device)?;
    let hold = |bytes| cuda.allocate(Api::Plain, bytes, Stream::LEGACY);
    let block = (options.bytes > 0).then(|| hold(options.bytes)).transpose()?;
    let pattern = [0xa5u8; PROBE];
    let ends = [0, options.bytes.saturating_sub(PROBE as u64)];
    if let Some(block) = &block {
        ends.iter().try_for_each(|&offset| cuda.write(block, offset, &pattern))?;
    }
    let (free, total) = cuda.mem_info()?;
    report::line("ready", json!({ "held": options.bytes, "free": free, "total": total }));
    stop::until_stopped(options.limit);
    let mut intact = true;
    if let Some(block) = &block {
        for offset in ends {
            let mut back = [0u8; PROBE];
            cuda.read(block, offset, &mut back)?;
            intact &= back == pattern;
        }
        cuda.free(block, Stream::LEGACY)?;
    }
    cuda.close()?;
    report::line("done", json!({ "intact": intact }));
    if intact { Ok(()) } else { Err(Exit::new(exit::CORRUPTED, "held data changed")) }
}
