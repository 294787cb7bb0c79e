//! One request, several limits: where its parts go, and what the limits have left together.

use super::contend::contend;
use super::{Contention, Ledger, Reason, charged_total, granted, publish, withdraw};
use crate::sync::Ordering;

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
///
/// # Errors
/// See [`Reason`].
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
pub(super) fn limits<L: Ledger>(ledgers: &[L]) -> u64 {
    ledgers.iter().map(Ledger::limit).fold(0, u64::saturating_add)
}

/// Whether each limit that has a part of `split`, which the caller has published, holds for what is charged
/// now. It is reserved then. A request of nothing is one part of nothing, of any limit that holds.
pub(super) fn all_fit<L: Ledger>(ledgers: &[L], split: &Split) -> bool {
    let holds = |ledger: &L| charged_total(ledger) <= ledger.limit();
    let has_part = |at: usize| split[at] > 0;
    match (0..ledgers.len()).any(has_part) {
        true => (0..ledgers.len()).filter(|&at| has_part(at)).all(|at| holds(&ledgers[at])),
        false => ledgers.iter().any(holds),
    }
}

/// Whether a request does not fit beside what is granted, and so did not at one moment of the call. `None`
/// if releases kept interfering.
pub(super) fn is_over<L: Ledger>(ledgers: &[L], bytes: u64) -> Option<bool> {
    at_rest(ledgers, || {
        let used = |at: usize| granted(&ledgers[at], Ordering::Acquire);
        fill(ledgers, bytes, used).is_none()
    })
}

/// Where a request could go by what is charged beside `own`, which the caller has published. `None` where
/// there is no room.
pub(super) fn by_charges<L: Ledger>(ledgers: &[L], bytes: u64, own: &Split) -> Option<Split> {
    fill(ledgers, bytes, |at| charged_total(&ledgers[at]).saturating_sub(own[at]))
}

/// Where a request goes that waits with its bytes published: by what is granted, or into the first, where no
/// sum says that it fits.
pub(super) fn by_grants<L: Ledger>(ledgers: &[L], bytes: u64) -> Split {
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
pub(super) fn move_to<L: Ledger>(ledgers: &[L], split: &mut Split, wanted: &Split) {
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
    use crate::sync::Word as _;
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
