//! Memory pools under the quota: CUDA Driver API, "Stream Ordered Memory Allocator", and CUDA
//! Programming Guide, "Stream-Ordered Memory Allocator". The simulated pools grow by 32 MiB.

use crate::{OUT_OF_MEMORY, both, held, quota, ready};
use tessera_harness::{Conversation, GIB, MIB, Pages, Preloaded, Rng, SimGpu, compile_c, until};
use tessera_region::layout::Kind;

const CHUNK: u64 = 32 * MIB;
/// The stream that `block` blocks, and another.
const BLOCKED: u64 = 1;
const FREE: u64 = 2;

fn tenant(sim: &SimGpu, pages: &Pages) -> Conversation {
    Conversation::with_context("pools", sim, pages)
}

/// A tenant, and a witness of what is physically free.
fn watched(bytes: u64) -> (SimGpu, Pages, Conversation, Conversation) {
    let (sim, pages, tenant) = held("pools", bytes);
    let witness = witness(&sim);
    (sim, pages, tenant, witness)
}

/// The same program without shim or quota: sees what is physically free.
fn witness(sim: &SimGpu) -> Conversation {
    ready(Preloaded::bare(compile_c("pools")).sim(sim))
}

#[test]
fn a_pool_is_charged_what_the_driver_reserves_for_it() {
    let (_sim, pages, mut tenant) = held("pools", 256 * MIB);
    let pool = tenant.must("default 0");
    let first = tenant.must(&format!("async {MIB} 8"));
    assert_eq!(pages.charged(0), CHUNK);
    let second = tenant.must(&format!("async {} 8", 20 * MIB));
    assert_eq!(pages.charged(0), CHUNK, "from the same chunk");
    let third = tenant.must(&format!("async {} 8", 40 * MIB));
    assert_eq!(pages.charged(0), tenant.must(&format!("reserved {pool}")));
    assert_eq!(pages.charged(0), 3 * CHUNK);
    assert_eq!(pages.snapshot().slots[0].kinds[Kind::Async as usize], 3 * CHUNK);
    assert_eq!(tenant.must("info"), 256 * MIB - 3 * CHUNK);
    for pointer in [first, second, third] {
        tenant.must(&format!("free_async {pointer} 8"));
    }
    tenant.must("sync");
    assert_eq!(pages.charged(0), 0);
    assert_eq!(pages.snapshot().slots[0].kinds[Kind::Async as usize], 0);
}

/// "the allocator will try to release memory back to the OS on the next call to stream, event or
/// context synchronize" (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
#[test]
fn chunks_come_back_at_every_synchronisation() {
    let (_sim, pages, mut tenant) = held("pools", 256 * MIB);
    for synchronise in ["sync", "stream_sync 3", "event_sync 3"] {
        let pointer = tenant.must(&format!("async {MIB} 3"));
        tenant.must(&format!("free_async {pointer} 3"));
        tenant.must(synchronise);
        assert_eq!(pages.charged(0), 0, "{synchronise}");
    }
    let pointer = tenant.must(&format!("async {MIB} 3"));
    tenant.must(&format!("free {pointer}"));
    tenant.must("sync");
    assert_eq!(pages.charged(0), 0, "a free that waits");
    // Of another stream: nothing is known to be free. Then of the right one.
    let pointer = tenant.must(&format!("async {MIB} {BLOCKED}"));
    tenant.must(&format!("block {BLOCKED}"));
    tenant.must(&format!("free_async {pointer} {BLOCKED}"));
    tenant.must(&format!("stream_sync {FREE}"));
    assert_eq!(pages.charged(0), CHUNK);
    tenant.must("unblock");
    tenant.must(&format!("stream_sync {BLOCKED}"));
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn a_release_threshold_keeps_chunks_charged_until_it_is_lowered() {
    let (_sim, pages, mut tenant) = held("pools", 256 * MIB);
    let pool = tenant.must("default 0");
    tenant.must(&format!("threshold {pool} {}", 64 * MIB));
    let pointer = tenant.must(&format!("async {} 8", 90 * MIB));
    tenant.must(&format!("free_async {pointer} 8"));
    tenant.must("sync");
    let kept = tenant.must(&format!("reserved {pool}"));
    assert!(kept >= 64 * MIB);
    assert_eq!((pages.charged(0), tenant.must("info")), (kept, 256 * MIB - kept));
    tenant.must(&format!("threshold {pool} 0"));
    tenant.must("sync");
    assert_eq!(pages.charged(0), 0);
    // Trimmed by hand.
    tenant.must(&format!("threshold {pool} {GIB}"));
    let pointer = tenant.must(&format!("async {} 8", 90 * MIB));
    tenant.must(&format!("free_async {pointer} 8"));
    tenant.must("sync");
    assert_eq!(pages.charged(0), 96 * MIB);
    tenant.must(&format!("trim {pool} 0"));
    assert_eq!(pages.charged(0), 0);
}

#[test]
fn unused_chunks_are_asked_back_before_anything_is_refused() {
    let (_sim, pages, mut tenant) = held("pools", 100 * MIB);
    let pool = tenant.must("default 0");
    let own = tenant.must("create 1 1 0");
    for (of, command) in [(pool, "async".to_owned()), (own, format!("from {own}"))] {
        tenant.must(&format!("threshold {of} {GIB}"));
        let pointer = tenant.must(&format!("{command} {} 8", 40 * MIB));
        tenant.must(&format!("free_async {pointer} 8"));
        tenant.must("sync");
        assert_eq!(pages.charged(0), 64 * MIB, "kept");
        let plain = tenant.must(&format!("alloc {}", 90 * MIB));
        assert_eq!(pages.charged(0), 90 * MIB);
        tenant.must(&format!("free {plain}"));
    }
    // One pool's for the other.
    let pointer = tenant.must(&format!("async {} 8", 60 * MIB));
    tenant.must(&format!("free_async {pointer} 8"));
    tenant.must("sync");
    tenant.must(&format!("from {own} {} 8", 96 * MIB));
    assert_eq!(pages.charged(0), 96 * MIB);
    assert_eq!(pages.snapshot().slots[0].did.refusals, 0);
}

#[test]
fn an_allocation_that_fits_into_what_is_reserved_needs_no_room() {
    let (_sim, pages, mut tenant) = held("pools", CHUNK);
    tenant.must(&format!("async {} 8", 20 * MIB));
    let second = tenant.must(&format!("async {} 8", 12 * MIB));
    assert_eq!(pages.charged(0), CHUNK);
    assert_eq!(tenant.ask("async 1 8").result, OUT_OF_MEMORY);
    tenant.must(&format!("free_async {second} 8"));
    tenant.must(&format!("async {} 8", 12 * MIB));
}

/// 40 MiB would do for the bytes asked for, not for the two chunks behind them.
#[test]
fn a_growth_that_does_not_fit_is_refused_and_undone() {
    let (_sim, pages, mut tenant, mut witness) = watched(48 * MIB);
    let before = witness.must("info");
    let pool = tenant.must("default 0");
    for _ in 0..3 {
        assert_eq!(tenant.ask(&format!("async {} 8", 40 * MIB)).result, OUT_OF_MEMORY);
        tenant.must("sync");
        assert_eq!(pages.charged(0), 0);
        assert_eq!(tenant.must(&format!("reserved {pool}")), 0);
        assert_eq!(witness.must("info"), before, "nothing is left of it");
    }
    assert_eq!(pages.snapshot().slots[0].did.refusals, 3);
    // What fits still does.
    let pointer = tenant.must(&format!("async {CHUNK} 8"));
    tenant.must(&format!("free_async {pointer} 8"));
    tenant.must("sync");
    tenant.must(&format!("alloc {}", 48 * MIB));
}

/// A pool that keeps what it has (as PyTorch and RMM set theirs) gives nothing back by itself.
#[test]
fn a_debt_is_everybodys_until_the_next_synchronisation_and_no_longer() {
    for synchronise in ["sync", "stream_sync 1", "event_sync 1", "info"] {
        let (sim, pages, mut tenant, mut witness) = watched(48 * MIB);
        let mut other = self::tenant(&sim, &pages);
        let before = witness.must("info");
        let pool = tenant.must("default 0");
        tenant.must(&format!("threshold {pool} {}", u64::MAX));
        tenant.must(&format!("block {BLOCKED}"));
        let refused = tenant.ask(&format!("async {} {BLOCKED}", 40 * MIB));
        assert_eq!(refused.result, OUT_OF_MEMORY);
        let held = before - witness.must("info");
        assert!(held > 48 * MIB, "the driver cannot take back what its stream has not passed");
        assert_eq!(pages.charged(0), held);
        for asked in ["alloc 2097152", "async 1 2"] {
            assert_eq!(tenant.ask(asked).result, OUT_OF_MEMORY, "{asked}");
            assert_eq!(other.ask(asked).result, OUT_OF_MEMORY, "{asked}, of another process");
        }
        assert_eq!(tenant.must("info"), 0);
        tenant.must("unblock");
        // What the stream has passed is known soon after.
        until("it has passed", || tenant.ask(&format!("query {BLOCKED}")).result == 0);
        tenant.must(synchronise);
        assert_eq!((before - witness.must("info"), pages.charged(0)), (0, 0), "{synchronise}");
        other.must(&format!("alloc {}", 48 * MIB));
    }
}

/// Large requests that rely on what the pool holds already, which the driver cannot use for them:
/// its order is another stream's.
#[test]
fn whatever_a_pool_took_too_much_is_gone_after_one_synchronisation() {
    let limit = 2048 * MIB;
    let (_sim, pages, mut tenant, mut witness) = watched(limit);
    let before = witness.must("info");
    let pool = tenant.must("default 0");
    tenant.must(&format!("threshold {pool} {}", u64::MAX));
    let mut random = Rng::with_seed(1);
    let mut live: Vec<(u64, u64)> = Vec::new();
    let mut refused = 0;
    for round in 0..40 {
        tenant.must(&format!("block {BLOCKED}"));
        for _ in 0..12 {
            let stream = 1 + random.u64(..3);
            if random.u64(..2) == 0 && !live.is_empty() {
                let (pointer, _) = live.swap_remove(random.usize(..live.len()));
                tenant.must(&format!("free_async {pointer} {stream}"));
            } else {
                let bytes = (1 + random.u64(..1000)) * MIB;
                let reply = tenant.ask(&format!("async {bytes} {stream}"));
                match reply.result {
                    0 => live.push((reply.values[0], bytes)),
                    _ => refused += 1,
                }
            }
            let held = before - witness.must("info");
            assert!(held <= pages.charged(0), "round {round}: {held} held");
        }
        tenant.must("unblock");
        tenant.must("sync");
        let held = before - witness.must("info");
        let used: u64 = live.iter().map(|(_, bytes)| bytes).sum();
        assert!(used <= held && held <= limit, "round {round}: {held} held, {used} of it used");
        assert_eq!(held, pages.charged(0), "round {round}");
    }
    assert!(refused > 40, "{refused} requests were refused");
}

#[test]
fn own_pools_are_charged_where_their_properties_say() {
    let (sim, pages) = both(96 * MIB, 64 * MIB);
    let mut tenant = tenant(&sim, &pages);
    let other = tenant.must("create 1 1 1");
    let here = tenant.must("create 1 1 0");
    assert_eq!((pages.charged(0), pages.charged(1)), (0, 0), "empty");
    let pointer = tenant.must(&format!("from {other} {} 8", 40 * MIB));
    assert_eq!((pages.charged(0), pages.charged(1)), (0, 64 * MIB));
    assert_eq!(tenant.ask(&format!("from {other} {} 8", 40 * MIB)).result, OUT_OF_MEMORY);
    tenant.must(&format!("from {here} {} 8", 40 * MIB));
    assert_eq!((pages.charged(0), pages.charged(1)), (64 * MIB, 64 * MIB));
    // The device's current pool.
    tenant.must(&format!("set 0 {here}"));
    tenant.must(&format!("async {} 8", 20 * MIB));
    assert_eq!(pages.charged(0), 64 * MIB, "from the pool that was set");
    tenant.must(&format!("free_async {pointer} 8"));
    tenant.must("sync");
    assert_eq!(pages.charged(1), 0);
}

#[test]
fn host_pools_are_not_charged() {
    /// `CU_MEM_LOCATION_TYPE_HOST`
    const HOST: u64 = 2;
    let (_sim, pages, mut tenant) = held("pools", 16 * MIB);
    let pool = tenant.must(&format!("create 1 {HOST} 0"));
    let pointer = tenant.must(&format!("from {pool} {} 8", 64 * MIB));
    assert_eq!(pages.charged(0), 0);
    tenant.must(&format!("free_async {pointer} 8"));
    // One that nobody saw being made: CUDA 13's default pool of the host.
    let pool = tenant.must(&format!("of 1 {HOST} 0"));
    tenant.must(&format!("from {pool} {} 8", 64 * MIB));
    assert_eq!(pages.charged(0), 0);
}

/// As `cuMemAllocManaged`: it may be resident on a device at any time, whatever is preferred.
#[test]
fn managed_pools_are_charged_to_their_device_or_the_current_one() {
    const MANAGED: u64 = 2;
    let (sim, pages) = both(64 * MIB, 64 * MIB);
    let mut tenant = tenant(&sim, &pages);
    for (how, gpu) in [("create 2 1 1", 1), ("create 2 0 0", 0), ("create 2 2 0", 0)] {
        let pool = tenant.must(how);
        let pointer = tenant.must(&format!("from {pool} {} 8", 40 * MIB));
        assert_eq!(pages.charged(gpu), 64 * MIB, "{how}");
        assert_eq!(tenant.ask(&format!("from {pool} {} 8", 40 * MIB)).result, OUT_OF_MEMORY);
        tenant.must(&format!("free_async {pointer} 8"));
        tenant.must("sync");
        tenant.must(&format!("destroy {pool}"));
        assert_eq!((pages.charged(0), pages.charged(1)), (0, 0), "{how}");
    }
    let pool = tenant.must(&format!("of {MANAGED} 1 1"));
    tenant.must(&format!("from {pool} {MIB} 8"));
    assert_eq!((pages.charged(0), pages.charged(1)), (0, CHUNK));
}

#[test]
fn a_pool_on_a_gpu_that_the_page_does_not_name_is_refused_memory() {
    let (_sim, _pages, mut tenant, mut witness) = watched(256 * MIB);
    let pool = tenant.must("create 1 1 1");
    assert_eq!(tenant.ask(&format!("from {pool} 1 8")).result, OUT_OF_MEMORY);
    let default = tenant.must("default 1");
    assert_eq!(tenant.ask(&format!("from {default} 1 8")).result, OUT_OF_MEMORY);
    let pool = witness.must("default 1");
    assert_eq!(witness.must(&format!("reserved {pool}")), 0);
}

/// "the resources associated with the pool will be released automatically once there are no more
/// outstanding allocations" (`cuMemPoolDestroy`).
#[test]
fn a_destroyed_pool_stays_charged_until_its_last_allocation_is_freed() {
    let (_sim, pages, mut tenant, mut witness) = watched(256 * MIB);
    let before = witness.must("info");
    for release in ["free_async", "free"] {
        let pool = tenant.must("create 1 1 0");
        let first = tenant.must(&format!("from {pool} {} 8", 40 * MIB));
        let second = tenant.must(&format!("from {pool} {} 8", 8 * MIB));
        tenant.must(&format!("destroy {pool}"));
        assert_eq!(pages.charged(0), before - witness.must("info"));
        tenant.must(&format!("{release} {first} 8"));
        tenant.must("sync");
        assert!(pages.charged(0) >= CHUNK, "one lives");
        tenant.must(&format!("{release} {second} 8"));
        tenant.must("sync");
        assert_eq!(witness.must("info"), before);
        assert_eq!(pages.charged(0), 0, "{release}");
    }
    // Empty ones go at once, and their handles are used again.
    for _ in 0..200 {
        let pool = tenant.must("create 1 1 0");
        let pointer = tenant.must(&format!("from {pool} {MIB} 8"));
        tenant.must(&format!("free {pointer}"));
        tenant.must(&format!("destroy {pool}"));
    }
    tenant.must("sync");
    assert_eq!(pages.charged(0), 0);
    let default = tenant.must("default 0");
    assert_ne!(tenant.ask(&format!("destroy {default}")).result, 0);
}

/// Pools belong to devices, so the driver is asked what a reset left of them.
#[test]
fn after_a_reset_the_charge_is_what_the_driver_still_reserves() {
    let (_sim, _pages, mut tenant, mut witness) = watched(256 * MIB);
    let before = witness.must("info");
    tenant.must(&format!("async {} 8", 40 * MIB));
    tenant.must("reset 0");
    tenant.must("retain 0");
    assert_eq!(256 * MIB - tenant.must("info"), before - witness.must("info"));
}

/// "During stream capture, this function results in the creation of an allocation node"
/// (`cuMemAllocAsync`).
#[test]
fn a_capture_takes_no_memory_and_survives_refusals() {
    let (_sim, pages, mut tenant) = held("pools", 64 * MIB);
    let pool = tenant.must("default 0");
    tenant.must(&format!("threshold {pool} {GIB}"));
    let pointer = tenant.must(&format!("async {} 8", 40 * MIB));
    tenant.must(&format!("free_async {pointer} 8"));
    tenant.must("sync");
    tenant.must("capture 3");
    let node = tenant.must(&format!("async {} 3", 200 * MIB));
    assert_eq!(pages.charged(0), 64 * MIB, "nothing more");
    // Trims and settles in the middle of the capture, which must not notice.
    tenant.must(&format!("async {} {FREE}", 33 * MIB));
    assert_eq!(tenant.ask(&format!("async {} {FREE}", 200 * MIB)).result, OUT_OF_MEMORY);
    tenant.must(&format!("free_async {node} 3"));
    tenant.must("captured 3");
    assert_eq!(pages.charged(0), 64 * MIB);
}

#[test]
fn racing_on_the_edge_of_the_quota_leaves_nothing_behind() {
    let (_sim, pages, mut tenant, mut witness) = watched(100 * MIB);
    let before = witness.must("info");
    let pool = tenant.must("default 0");
    for bytes in [8 * MIB, 24 * MIB, 40 * MIB] {
        let race = tenant.ask(&format!("race 8 60 {bytes}"));
        let [granted, refused] = race.values[..] else { panic!("{race}") };
        assert_eq!((race.result, granted + refused), (0, 480));
        assert!(granted > 0, "{race}");
        tenant.must("sync");
        assert_eq!((pages.charged(0), tenant.must(&format!("reserved {pool}"))), (0, 0));
        assert_eq!(witness.must("info"), before);
        // Nothing is left in debt either.
        let pointer = tenant.must(&format!("async {} 8", 96 * MIB));
        tenant.must(&format!("free_async {pointer} 8"));
        tenant.must("sync");
    }
}

#[test]
fn racing_processes_share_the_quota_with_their_pools() {
    let (sim, pages) = quota(512 * MIB);
    let mut tenants: Vec<_> = (0..4).map(|_| tenant(&sim, &pages)).collect();
    let mut witness = witness(&sim);
    let before = witness.must("info");
    let command = format!("keep 4 {}", 24 * MIB);
    tenants.iter_mut().for_each(|tenant| tenant.send(&command));
    let granted: u64 = tenants.iter_mut().map(|tenant| tenant.reply(&command).ok()).sum();
    assert!(granted >= 12, "{granted}");
    tenants.iter_mut().for_each(|tenant| _ = tenant.must("sync"));
    assert_eq!(pages.charged(0), before - witness.must("info"));
    assert!(pages.charged(0) <= 512 * MIB);
}
