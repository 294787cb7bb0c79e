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
    let (mut launched, mut is_shallow, mut stuck) = (0u64, true, options.stuck);
    let copied = vec![1; options.copy];
    let room = if copied.is_empty() { 0 } else { work.room(copied.len())? };
    loop {
        if launched.is_multiple_of(LOOK_EVERY) && clock.asked(Duration::ZERO) == Some(Asked::Stop) {
            report::line("done", json!({ "seconds": clock.seconds(), "launched": launched }));
            return Ok(());
        }
        is_shallow = is_shallow && clock.start.elapsed() < options.shallow;
        work.launch()?;
        launched += 1;
        let is_due = options.sync_every > 0 && launched.is_multiple_of(options.sync_every);
        if stuck.is_some_and(|after| clock.start.elapsed() >= after) {
            stuck = None;
            is_shallow = false;
            work.wait_for_ever()?;
        }
        if let Some((ms, every)) = options.host
            && launched.is_multiple_of(every)
        {
            work.sleep_on_host(ms)?;
        }
        if is_due && !copied.is_empty() {
            work.copy_in(room, &copied)?;
        }
        if is_due || is_shallow {
            work.wait()?;
        }
    }
}
