//! Steps 3 and 4 of a request: others stand in its way.

use super::parts::{Split, all_fit, by_charges, by_grants, is_over, limits, move_to};
use super::{Contention, Ledger, MAX_PARTS, Obstacle, Reason, departing_sum, granted_sum};
use crate::sync::Word;

/// Waits without the queue before trying to get it: most collisions are over by then.
const ROUNDS_BEFORE_QUEUE: u32 = 3;
/// A killed process leaves reserved bytes that only recovery removes; look for such now and then.
const ROUNDS_BETWEEN_RECOVERIES: u32 = 16;

/// Called with `split` published; returns with all `bytes` published if they are reserved, and with nothing
/// else.
#[cold]
pub(super) fn contend<L: Ledger, C: Contention>(
    ledgers: &[L],
    bytes: u64,
    split: &mut Split,
    mut contention: C,
) -> Result<(), Reason> {
    const NOTHING: Split = [0; MAX_PARTS];
    let mut queued = false;
    let mut no_dead = false;
    let mut round = 0;
    let refuse = |split: &mut Split, reason| {
        move_to(ledgers, split, &NOTHING);
        Err(reason)
    };
    loop {
        if is_over(ledgers, bytes) == Some(true) {
            if no_dead {
                return refuse(split, Reason::OverQuota);
            }
            // Refuse at the next judgement, if this finds nobody dead.
            no_dead = !contention.recover_dead();
        } else {
            no_dead = false;
            if !queued {
                move_to(ledgers, split, &NOTHING);
            }
            if round % ROUNDS_BETWEEN_RECOVERIES == ROUNDS_BEFORE_QUEUE {
                contention.recover_dead();
            }
            let obstacle = obstacle(ledgers, bytes);
            if !contention.pause(obstacle) {
                let reason = match obstacle {
                    Obstacle::Unsettled => Reason::Contended,
                    Obstacle::Departing => Reason::Departing,
                };
                return refuse(split, reason);
            }
            round += 1;
            queued = queued || (round > ROUNDS_BEFORE_QUEUE && contention.try_queue());
        }
        if bytes > limits(ledgers) {
            return refuse(split, Reason::OverQuota);
        }
        // Without the queue, publish only what could go: a hopeless publication stands in the way
        // of others.
        let wanted = match by_charges(ledgers, bytes, split) {
            Some(wanted) => wanted,
            None if queued => by_grants(ledgers, bytes),
            None => continue,
        };
        move_to(ledgers, split, &wanted);
        L::Word::fence();
        if all_fit(ledgers, split) {
            return Ok(());
        }
    }
}

/// What a request that does not go ahead waits for, as far as a glance can tell.
fn obstacle<L: Ledger>(ledgers: &[L], bytes: u64) -> Obstacle {
    let sum = |of: fn(&L) -> u64| ledgers.iter().map(of).fold(0, u64::saturating_add);
    let departing = sum(departing_sum);
    let all = sum(granted_sum).saturating_add(bytes).saturating_add(departing);
    let is_departing = departing > 0 && all > limits(ledgers);
    if is_departing { Obstacle::Departing } else { Obstacle::Unsettled }
}
