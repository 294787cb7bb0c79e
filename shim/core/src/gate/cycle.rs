//! Rationing without an arbiter: the process opens and closes a gate of its own, by the clock that all
//! tenants of the machine share. The quota page has each tenant's part of the cycle.

use super::ahead;
use super::closing::Drain;
use super::futex;
use super::helper::Helper;
use super::relief::Relief;
use crate::log::now_ns;
use crate::spin::sleep_us;
use crate::state::Process;
use core::sync::atomic::{AtomicU32, Ordering};
use tessera_region::layout::{
    ARBITER_GONE, ARBITER_STALE_NS, CYCLE_NS, GATE_CLOSED, GATE_OPEN, gate_epoch, gate_word,
};
use tessera_region::quota::Policy;

/// Longest sleep between two looks for the arbiter, nanoseconds.
const LOOK_NS: u64 = 20_000_000;

/// Whether the arbiter has given no sign for too long, or has said that it goes.
pub(super) fn is_silent(process: &Process, now_ns: u64) -> bool {
    let last_ns = process.gate_quota().arbiter_ns();
    last_ns <= ARBITER_GONE || now_ns.saturating_sub(last_ns) > ARBITER_STALE_NS
}

/// Where in the cycle a tenant is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    is_open: bool,
    /// Until that changes.
    left_ns: u64,
}

/// The part of a tenant with `millis` thousandths of a GPU from `phase` thousandths on.
fn part(now_ns: u64, phase: u32, millis: u32) -> Part {
    let start_ns = u64::from(phase) * (CYCLE_NS / 1000);
    let length_ns = u64::from(millis.clamp(1, 1000)) * (CYCLE_NS / 1000);
    let at_ns = (now_ns + CYCLE_NS - start_ns % CYCLE_NS) % CYCLE_NS;
    match at_ns < length_ns {
        true => Part { is_open: true, left_ns: length_ns - at_ns },
        false => Part { is_open: false, left_ns: CYCLE_NS - at_ns },
    }
}

fn part_of(process: &Process) -> Part {
    let quota = process.gate_quota();
    let millis = match quota.policy(0) {
        Policy::None => 1000,
        _ => process.account.shares().cores_millis(),
    };
    part(now_ns(), quota.phase_millis(0), millis)
}

/// Sets the process's own gate.
fn set(word: &AtomicU32, state: u32) {
    let epoch = gate_epoch(word.load(Ordering::Relaxed)).wrapping_add(1);
    word.store(gate_word(epoch, state), Ordering::Release);
    futex::wake(word);
}

/// Rations the process until the arbiter is back.
pub(super) fn run(process: &Process, helper: &mut Helper) {
    let gate = &process.gate;
    process.account.count_gate_timeout();
    set(&gate.own, GATE_CLOSED);
    gate.look_at(process, &gate.own);
    ahead::release(gate);
    // A thread that sleeps at the page's word is to look at ours.
    futex::wake(gate.page());
    let (mut was_open, mut drained) = (false, false);
    loop {
        let now_ns = now_ns();
        helper.keep_connected(process, now_ns);
        if !is_silent(process, now_ns) && helper.is_connected() {
            break;
        }
        let Part { is_open, left_ns } = part_of(process);
        if is_open != was_open {
            set(&gate.own, if is_open { GATE_OPEN } else { GATE_CLOSED });
            was_open = is_open;
            drained = false;
        }
        if !is_open && !drained {
            drained = drain(process, 0, || !part_of(process).is_open, || {}, |_| {}).is_some();
        } else {
            sleep_us(u32::try_from(left_ns.min(LOOK_NS) / 1_000).unwrap_or(0).max(1));
        }
    }
    if was_open {
        set(&gate.own, GATE_CLOSED);
    }
    gate.look_at(process, gate.page());
    // A thread that sleeps at ours is to look at the page's.
    gate.wanted.store(0, Ordering::Relaxed);
    set(&gate.own, GATE_CLOSED);
}

/// Waits until nothing is in flight, as long as `still`, and lets launches pass that it may wait for:
/// how many. So many, `due`, pass at once, because another process may wait for them. Calls
/// `stuck` once if it stands still all the same, and `late` at each look: whether it waits for the host.
pub(super) fn drain(
    process: &Process,
    due: u32,
    still: impl Fn() -> bool,
    stuck: impl Fn(),
    late: impl Fn(bool),
) -> Option<u32> {
    let relief = Relief::new(process);
    relief.pass(due);
    let goes_on = || {
        let is_still = still();
        if is_still && relief.look() {
            stuck();
        }
        is_still
    };
    loop {
        let begun = Drain::begin(process, || {
            Drain::peek(process);
            goes_on()
        });
        let Some(mut drain) = begun else {
            relief.give_up();
            return None;
        };
        // A launch that was let pass is taken up at once: its end is progress, too.
        while !relief.is_taken() && !drain.look(process) {
            if !goes_on() {
                relief.give_up();
                return None;
            }
            late(!relief.is_at_hand() && drain.waits_elsewhere(process));
            drain.nap(process);
        }
        relief.await_due(&still);
        if !relief.was_taken() {
            drain.settle(process);
            return Some(relief.passes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_parts_of_tenants_do_not_overlap_while_their_shares_fit() {
        for at in 0..CYCLE_NS / 1000 {
            let now_ns = at * 1000 + 7 * CYCLE_NS;
            let open = [(0, 300), (300, 500), (800, 200)]
                .into_iter()
                .filter(|&(phase, millis)| part(now_ns, phase, millis).is_open);
            assert_eq!(open.count(), 1, "at {now_ns}");
        }
    }

    proptest! {
        #[test]
        fn the_state_changes_when_what_is_left_is_over_and_not_before(
            now_ns in 0..u64::MAX / 4, phase in 0..1000u32, millis in 1..1000u32,
        ) {
            let now = part(now_ns, phase, millis);
            prop_assert!(now.left_ns > 0 && now.left_ns <= CYCLE_NS);
            let last = part(now_ns + now.left_ns - 1, phase, millis);
            prop_assert_eq!(last.is_open, now.is_open);
            let next = part(now_ns + now.left_ns, phase, millis);
            prop_assert_ne!(next.is_open, now.is_open);
            prop_assert_eq!(now.left_ns + next.left_ns >= CYCLE_NS, now.left_ns + next.left_ns == CYCLE_NS);
        }

        #[test]
        fn a_whole_gpu_is_always_open(now_ns in 0..u64::MAX / 4, phase in 0..1000u32) {
            prop_assert!(part(now_ns, phase, 1000).is_open);
        }
    }
}
