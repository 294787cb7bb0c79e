//! A tenant that always has more to do.

use std::time::Duration;

use serde_json::json;

use super::work::Work;
use super::{Clock, Options};
use crate::exit::Exit;
use crate::report;
use crate::stop::Asked;

/// Launches between two looks whether to stop.
const LOOK_EVERY: u64 = 16;

/// Launches until asked to stop. What is queued then is left behind, as by a killed program.
pub(super) fn run(work: &Work, options: &Options, clock: Clock) -> Result<(), Exit> {
    let (mut launched, mut is_shallow) = (0u64, true);
    loop {
        if launched.is_multiple_of(LOOK_EVERY) && clock.asked(Duration::ZERO) == Some(Asked::Stop) {
            report::line("done", json!({ "seconds": clock.seconds(), "launched": launched }));
            return Ok(());
        }
        is_shallow = is_shallow && clock.start.elapsed() < options.shallow;
        work.launch()?;
        launched += 1;
        let is_due = options.sync_every > 0 && launched.is_multiple_of(options.sync_every);
        if is_due || is_shallow {
            work.wait()?;
        }
    }
}
