//! One request, several limits: where its parts go, what the limits have left together, and how it waits for others.

use super::{
    Contention, Ledger, Ordering, Reason, Word, charged_total, departing_sum, granted, granted_sum,
    publish, withdraw,
};

/// Most limits that one request is asked of.
pub const MAX_PARTS: usize = 16;
/// The part of a request in each limit, in their order.
pub type Split = [u64; MAX_PARTS];

/// Attempts at a consistent sum before saying that there is none.
const COLLECTIONS: usize = 4;

/// Reserves `bytes` in parts over `ledgers`, one to [`MAX_PARTS`] of them: afterwards `split` says how
/// many are in the own charged word of each, or the request was refused and `split` is zero. The first
/// are filled first.
///
/// Lists of different processes name their limits in one order, that of the shares' ids.
pub fn reserve_in_parts<L: Ledger, C: Contention>(
    ledgers: &[L],
    bytes: u64,
    split: &mut Split,
    contention: impl FnOnce() -> C,
) -> Result<(), Reason> {
    *split = [0; MAX_PARTS];
    // What can never fit is not published: words could wrap.
    if bytes > limits(ledgers) {
        return Err(Reason::OverQuota);
    }
    if let Some(wanted) = by_charges(ledgers, bytes, split) {
        move_to(ledgers, split, &wanted);
        if all_fit(ledgers, split) {
            return Ok(());
        }
    }
    contend(ledgers, bytes, split, contention())
}

/// What all may hold together. Saturates.
fn limits<L: Ledger>(ledgers: &[L]) -> u64 {
    ledgers.iter().map(Ledger::limit).fold(0, u64::saturating_add)
}

/// Whether each limit that has a part of `split`, which the caller has published, holds for what is charged
/// now. It is reserved then. A request of nothing is one part of nothing, of any limit that holds.
fn all_fit<L: Ledger>(ledgers: &[L], split: &Split) -> bool {
    let holds = |ledger: &L| charged_total(ledger) <= ledger.limit();
    let has_part = |at: usize| split[at] > 0;
    match (0..ledgers.len()).any(has_part) {
        true => (0..ledgers.len()).filter(|&at| has_part(at)).all(|at| holds(&ledgers[at])),
        false => ledgers.iter().any(holds),
    }
}

/// Whether a request does not fit beside what is granted, and so did not at one moment of the call. `None`
/// if releases kept interfering.
fn is_over<L: Ledger>(ledgers: &[L], bytes: u64) -> Option<bool> {
    at_rest(ledgers, || {
        let used = |at: usize| granted(&ledgers[at], Ordering::Acquire);
        fill(ledgers, bytes, used).is_none()
    })
}

/// Where a request could go by what is charged beside `own`, which the caller has published. `None` where
/// there is no room.
fn by_charges<L: Ledger>(ledgers: &[L], bytes: u64, own: &Split) -> Option<Split> {
    fill(ledgers, bytes, |at| charged_total(&ledgers[at]).saturating_sub(own[at]))
}

/// Where a request goes that waits with its bytes published: by what is granted, or into the first, where no
/// sum says that it fits.
fn by_grants<L: Ledger>(ledgers: &[L], bytes: u64) -> Split {
    let used = |at: usize| granted(&ledgers[at], Ordering::Relaxed);
    fill(ledgers, bytes, used).unwrap_or_else(|| {
        let mut split = [0; MAX_PARTS];
        split[0] = bytes;
        split
    })
}

/// Fills one limit after the other beside what is used of each. `None` where there is not enough room; for
/// nothing there is, unless every limit is passed already.
fn fill<L: Ledger>(ledgers: &[L], bytes: u64, used: impl Fn(usize) -> u64) -> Option<Split> {
    let (mut split, mut left, mut any_holds) = ([0; MAX_PARTS], bytes, false);
    for (at, ledger) in ledgers.iter().enumerate() {
        if left > 0 || !any_holds {
            let room = ledger.limit().checked_sub(used(at));
            any_holds |= room.is_some();
            split[at] = left.min(room.unwrap_or(0));
            left -= split[at];
        }
    }
    (left == 0 && any_holds).then_some(split)
}

/// Publishes and withdraws what lies between two splits, and leaves them equal. Nothing is withdrawn
/// before all is published, so bytes that only move are there all the time.
fn move_to<L: Ledger>(ledgers: &[L], split: &mut Split, wanted: &Split) {
    for (at, ledger) in ledgers.iter().enumerate() {
        if wanted[at] > split[at] {
            publish(ledger, wanted[at] - split[at]);
        }
    }
    for (at, ledger) in ledgers.iter().enumerate() {
        withdraw(ledger, split[at].saturating_sub(wanted[at]));
    }
    *split = *wanted;
}

/// What `read` says while nothing was lowered in any ledger: no epoch moved from before it began until
/// after it ended. `None` if releases kept interfering.
pub(super) fn at_rest<L: Ledger, T>(ledgers: &[L], read: impl Fn() -> T) -> Option<T> {
    let mut before = epochs(ledgers);
    for _ in 0..COLLECTIONS {
        let found = read();
        let after = epochs(ledgers);
        if after == before {
            return Some(found);
        }
        before = after;
    }
    None
}

/// A word that changes when any slot's epoch does. 2^64 values stand for more, of which two are alike once
/// in so many; a list of them all would be too long for some threads' stacks.
fn epochs<L: Ledger>(ledgers: &[L]) -> u64 {
    let mut all = 0u64;
    for ledger in ledgers {
        for slot in 0..ledger.high_water() {
            // Acquire throughout: each load is before the next; pairs with Release in `commit`,
            // `release` and `Slot::zero`.
            let claimed = ledger.claimed(slot).load(Ordering::Acquire);
            let epoch = claimed.wrapping_add(ledger.frees(slot).load(Ordering::Acquire));
            // One to one in the epoch, and in what came before it.
            all = (all.rotate_left(23) ^ epoch).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
    }
    all
}

// Steps 3 and 4 of a request: others stand in its way.

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
            let reason = obstacle(ledgers, bytes);
            if !contention.pause(reason) {
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
fn obstacle<L: Ledger>(ledgers: &[L], bytes: u64) -> Reason {
    let sum = |of: fn(&L) -> u64| ledgers.iter().map(of).fold(0, u64::saturating_add);
    let departing = sum(departing_sum);
    let all = sum(granted_sum).saturating_add(bytes).saturating_add(departing);
    let is_departing = departing > 0 && all > limits(ledgers);
    if is_departing { Reason::Departing } else { Reason::Contended }
}
