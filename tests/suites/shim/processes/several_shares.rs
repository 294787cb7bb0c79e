//! Several shares in one container: of different GPUs each has its own quota, of one GPU they are their sum.

use crate::{OUT_OF_MEMORY, ready};
use std::path::Path;

use tempfile::TempDir;
use tessera_harness::{
    Arbiter, Conversation, Heard, MIB, Pages, Preloaded, SimGpu, can_contain, compile_c, external,
};
use tessera_region::quota::Policy;
use tessera_region::session::Message;

const NOT_READY: i64 = 802;

/// Shares, each in a directory named by its allocation.
struct Container {
    dir: TempDir,
    shares: Vec<Pages>,
}

impl Container {
    fn of(shares: &[&[(&str, u64)]]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let share =
            |(at, limits): (usize, &&[(&str, u64)])| Pages::share(dir.path(), &id(at), limits);
        let shares = shares.iter().enumerate().map(share).collect();
        Self { dir, shares }
    }

    /// A process with all of them.
    fn tenant(&self, sim: &SimGpu) -> Conversation {
        self.tenant_in(self.dir.path(), sim)
    }

    /// A process with those that a directory holds.
    fn tenant_in(&self, dir: &Path, sim: &SimGpu) -> Conversation {
        let program = Preloaded::new(compile_c("calls")).sim(sim).env("TESSERA_DIR", dir);
        ready(program)
    }

    /// What each is charged on its first GPU, in MiB.
    fn charged(&self) -> Vec<u64> {
        self.shares.iter().map(|share| share.charged(0) / MIB).collect()
    }
}

/// Two shares of so many MiB of one GPU.
fn twins(mib: u64) -> (SimGpu, Container) {
    let sim = SimGpu::start_default();
    let gpu: &[_] = &[(sim.uuid(0), mib * MIB)];
    let container = Container::of(&[gpu, gpu]);
    (sim, container)
}

/// As allocations are named, in this order.
fn id(at: usize) -> String {
    format!("{at:032x}")
}

fn alloc(tenant: &mut Conversation, mib: u64) -> u64 {
    tenant.must(&format!("alloc {}", mib * MIB))
}

fn is_refused(tenant: &mut Conversation, mib: u64) {
    assert_eq!(tenant.ask(&format!("alloc {}", mib * MIB)).result, OUT_OF_MEMORY, "{mib} MiB");
}

#[test]
fn shares_of_two_gpus_are_accounted_apart() {
    let sim = SimGpu::start_default();
    let container = Container::of(&[&[(sim.uuid(1), 40 * MIB)], &[(sim.uuid(0), 20 * MIB)]]);
    let mut tenant = container.tenant(&sim);
    assert_eq!((tenant.must("total 0"), tenant.must("total 1")), (20 * MIB, 40 * MIB));
    alloc(&mut tenant, 20);
    is_refused(&mut tenant, 2);
    assert_eq!(tenant.ask("info").values, [0, 20 * MIB]);
    tenant.must("retain 1");
    assert_eq!(tenant.ask("info").values, [40 * MIB, 40 * MIB]);
    alloc(&mut tenant, 40);
    is_refused(&mut tenant, 2);
    assert_eq!(container.charged(), [40, 20]);
    // Each hears of its own refusals.
    let refusals = |share: &Pages| share.snapshot().slots[0].did.refusals;
    assert_eq!(container.shares.iter().map(refusals).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(tenant.ask("nvml 0").values, [20 * MIB, 0, 20 * MIB]);
    assert_eq!(tenant.ask("nvml 1").values, [40 * MIB, 0, 40 * MIB]);
}

#[test]
fn two_shares_of_one_gpu_are_their_sum_to_the_last_byte() {
    let sim = SimGpu::start_default();
    let container = Container::of(&[&[(sim.uuid(0), 30 * MIB)], &[(sim.uuid(0), 20 * MIB)]]);
    let mut tenant = container.tenant(&sim);
    assert_eq!(tenant.must("total 0"), 50 * MIB);
    assert_eq!(tenant.ask("info").values, [50 * MIB, 50 * MIB]);
    // More than either has.
    let large = alloc(&mut tenant, 44);
    assert_eq!(container.charged(), [30, 14]);
    let small = [alloc(&mut tenant, 2), alloc(&mut tenant, 4)];
    is_refused(&mut tenant, 2);
    assert_eq!(tenant.ask("alloc 1").result, OUT_OF_MEMORY);
    assert_eq!(tenant.ask("nvml 0").values, [50 * MIB, 0, 50 * MIB]);
    let said = ["50 MiB of its 50 MiB", sim.uuid(0)];
    // In another order than they were obtained, and again.
    tenant.must(&format!("free {large}"));
    assert_eq!(container.charged().iter().sum::<u64>(), 6);
    for pointer in small {
        tenant.must(&format!("free {pointer}"));
    }
    assert_eq!((container.charged(), tenant.must("info")), (vec![0, 0], 50 * MIB));
    let managed = tenant.must(&format!("managed {}", 50 * MIB));
    is_refused(&mut tenant, 2);
    tenant.must(&format!("free {managed}"));
    // Pools and pitched memory as well.
    let pooled = tenant.must(&format!("async {}", 32 * MIB));
    assert_eq!(container.charged(), [30, 2]);
    tenant.must(&format!("free_async {pooled}"));
    tenant.must("sync");
    alloc(&mut tenant, 50);
    let stderr = tenant.finish().stderr;
    assert!(said.iter().all(|part| stderr.contains(part)), "{stderr}");
}

#[test]
fn a_share_that_two_containers_have_is_one_quota() {
    let (sim, both) = twins(30);
    // The other container has the first share alone: the same directory, mounted there too.
    let alone = both.dir.path().join(id(0));
    let (mut one, mut other) = (both.tenant_in(&alone, &sim), both.tenant(&sim));
    assert_eq!((one.must("total 0"), other.must("total 0")), (30 * MIB, 60 * MIB));
    let first = alloc(&mut one, 20);
    alloc(&mut other, 40);
    assert_eq!(both.charged(), [30, 30]);
    is_refused(&mut one, 2);
    is_refused(&mut other, 2);
    one.must(&format!("free {first}"));
    alloc(&mut other, 20);
    is_refused(&mut one, 2);
    other.kill();
    alloc(&mut one, 30);
}

#[test]
fn processes_and_threads_that_race_for_overlapping_shares_get_what_there_is() {
    let (sim, container) = twins(50);
    let alone = container.dir.path().join(id(1));
    for round in 0..4 {
        let mut tenants =
            [container.tenant(&sim), container.tenant(&sim), container.tenant_in(&alone, &sim)];
        // 3 × 8 × 6 MiB are more than 100; churning on the way.
        let command = if round % 2 == 0 { "race 8 6291456" } else { "churn 40 6291456" };
        tenants.iter_mut().for_each(|tenant| tenant.send(command));
        let got: Vec<_> = tenants.iter_mut().map(|tenant| tenant.reply(command)).collect();
        assert!(got.iter().all(|reply| reply.result == 0), "{got:?}");
        if round % 2 == 0 {
            let granted: u64 = got.iter().map(|reply| reply.values[0]).sum();
            assert_eq!(granted * 6, container.charged().iter().sum::<u64>(), "{got:?}");
            // What is left beside them is less than one for those that have both.
            assert!((15..=16).contains(&granted), "{got:?}");
            let [one, two] = [0, 1].map(|at| container.shares[at].charged(0));
            assert!(one <= 50 * MIB && two <= 50 * MIB);
        } else {
            assert!(got.iter().all(|reply| reply.values == [40, 0]), "nobody was in need: {got:?}");
        }
        // Killed in the middle of something.
        tenants.iter_mut().for_each(|tenant| tenant.send("churn 100000 6291456"));
        std::thread::sleep(std::time::Duration::from_millis(20));
        tenants.iter_mut().for_each(Conversation::kill);
    }
    let mut last = container.tenant(&sim);
    alloc(&mut last, 100);
    assert_eq!(container.charged(), [50, 50]);
}

#[test]
fn a_limit_of_one_share_moves_while_it_is_used() {
    let (sim, container) = twins(20);
    let mut tenant = container.tenant(&sim);
    alloc(&mut tenant, 30);
    container.shares[1].quota.set_memory_limit(0, 40 * MIB);
    assert_eq!(tenant.ask("info").values, [30 * MIB, 60 * MIB]);
    let more = alloc(&mut tenant, 30);
    is_refused(&mut tenant, 2);
    container.shares[0].quota.set_memory_limit(0, 10 * MIB);
    assert_eq!(tenant.ask("info").values, [0, 50 * MIB]);
    tenant.must(&format!("free {more}"));
    // The first share has twice what it may; that takes nothing from the second.
    assert_eq!(tenant.must("info"), 30 * MIB);
    alloc(&mut tenant, 30);
    is_refused(&mut tenant, 2);
}

#[test]
fn a_forked_child_has_the_shares_and_a_slot_of_its_own_in_each() {
    let (sim, container) = twins(20);
    let program = Preloaded::new(compile_c("calls")).sim(&sim);
    let mut parent = Conversation::start(program.env("TESSERA_DIR", container.dir.path()));
    let call = |mib: u64| format!("forked init; retain 0; alloc {}", mib * MIB);
    assert_eq!(parent.ask(&call(42)).result, OUT_OF_MEMORY);
    assert_eq!(parent.ask(&call(40)).result, 0);
    assert_eq!(container.charged(), [0, 0], "the child has ended");
    parent.must("init");
    parent.must("retain 0");
    alloc(&mut parent, 40);
}

#[test]
fn shares_that_are_broken_or_foreign_or_too_many_close_the_gpu() {
    let sim = SimGpu::start_default();
    let gpu: &[_] = &[(sim.uuid(0), 20 * MIB)];
    let closed = |container: &Container, word: &str| {
        let program = Preloaded::new(compile_c("calls")).sim(&sim);
        let mut tenant = Conversation::start(program.env("TESSERA_DIR", container.dir.path()));
        assert_eq!(tenant.ask("init").result, NOT_READY, "{word}");
        let said = tenant.finish().stderr;
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("no GPU for this process") && said.contains(word), "{word}: {said}");
    };
    closed(&Container::of(&[]), "quota: absent");
    let missing = Container::of(&[gpu, gpu]);
    std::fs::remove_file(missing.shares[1].usage_file()).unwrap();
    closed(&missing, "1/usage: absent");
    let renamed = Container::of(&[gpu, gpu]);
    std::fs::rename(&renamed.shares[1].dir, renamed.dir.path().join(id(7))).unwrap();
    closed(&renamed, "another allocation");
    let littered = Container::of(&[gpu]);
    std::fs::create_dir(littered.dir.path().join("x")).unwrap();
    closed(&littered, "x/quota: absent");
    closed(&Container::of(&[gpu; 17]), "more than 16 shares");
}

/// What a shell says that runs in the container before the program starts.
fn in_container(container: &Container, sim: &SimGpu, script: &str) -> Preloaded {
    let program = compile_c("calls");
    let script =
        format!("set -e; cd /usr/local/tessera/pages; {script}; exec {}", program.display());
    Preloaded::new("/bin/sh").arg("-c").arg(script).sim(sim).in_container(container.dir.path())
}

#[test]
fn a_container_has_the_shares_that_are_mounted_and_none_that_it_makes() {
    if external::or_skip(can_contain(), "several shares in a container").is_none() {
        return;
    }
    let (sim, container) = twins(20);
    let mut tenant = ready(in_container(&container, &sim, ":"));
    alloc(&mut tenant, 40);
    is_refused(&mut tenant, 2);
    assert_eq!(container.charged(), [20, 20]);
    drop(tenant);

    let (own, made) = (id(0), id(9));
    let copy = format!("mkdir {made}; cp {own}/quota {own}/usage {made}");
    for script in [
        copy.clone(),
        // Links, one of them to a directory that is mounted read-only, and a stray file.
        format!("{copy}; mkdir ../x; mv {made} ../x/; ln -s ../x/{made} {made}"),
        format!("ln -s /usr/local/tessera/pages/{own} {made}"),
        "echo quota > more".to_owned(),
        // As the one share of a command of `tessera run` is.
        format!("cp {own}/quota {own}/usage ."),
    ] {
        let mut tenant = ready(in_container(&container, &sim, &script));
        alloc(&mut tenant, 40);
        is_refused(&mut tenant, 2);
        assert_eq!(container.charged(), [20, 20], "{script}");
    }
}

#[test]
fn a_container_in_which_only_made_shares_are_left_is_closed() {
    if external::or_skip(can_contain(), "containers without a share").is_none() {
        return;
    }
    let sim = SimGpu::start_default();
    let container = Container::of(&[&[(sim.uuid(0), 20 * MIB)]]);
    let (own, made) = (id(0), id(9));
    let script = format!("mkdir {made}; cp {own}/quota {own}/usage {made}; umount -R {own}");
    let mut tenant = Conversation::start(in_container(&container, &sim, &script));
    assert_eq!(tenant.ask("init").result, NOT_READY);
    let said = tenant.finish().stderr;
    let is_said = said.contains("not a read-only mount of the plugin's");
    assert!(is_said && said.lines().count() == 1, "{said}");
}

#[test]
fn a_container_without_any_share_is_closed() {
    if external::or_skip(can_contain(), "an empty container").is_none() {
        return;
    }
    let sim = SimGpu::start_default();
    let container = Container::of(&[&[(sim.uuid(0), 20 * MIB)]]);
    let script = format!("umount {0}/usage {0} && rmdir {0}", id(0));
    let mut bare = Conversation::start(in_container(&container, &sim, &script));
    assert_eq!(bare.ask("init").result, NOT_READY);
    let said = bare.finish().stderr;
    assert!(said.contains("/usr/local/tessera/pages: it holds no share"), "{said}");
}

/// Several gates, and launches: see `gate`.
#[test]
fn a_process_keeps_to_its_first_shares_gate_and_joins_the_others() {
    let sim = SimGpu::start_default();
    let gpu: &[_] = &[(sim.uuid(0), 200 * MIB)];
    let container = Container::of(&[gpu, gpu, gpu]);
    let [first, second, free] = &container.shares[..] else { unreachable!() };
    let [mut lead, mut other] = [first, second].map(Arbiter::start);
    assert_eq!(free.quota.spec().gpus[0].policy, Policy::None);
    let mut tenant = container.tenant(&sim);
    let pid = tenant.pid();
    tenant.send("launch");
    lead.await_hello(pid);
    lead.await_want(pid);
    let leads = |heard: &Heard| matches!(heard, Heard::Said(Message::Joins { leads: true, .. }));
    let joins = |heard: &Heard| matches!(heard, Heard::Said(Message::Joins { leads: false, .. }));
    let tokens = [lead.await_heard(pid, leads), other.await_heard(pid, joins)].map(|heard| {
        let Heard::Said(Message::Joins { token, .. }) = heard else { unreachable!() };
        token
    });
    assert_eq!(tokens[0], tokens[1]);
    // It waits for the first gate alone.
    other.open();
    assert!(!other.has_heard(pid, |heard| matches!(heard, Heard::Said(Message::Want { .. }))));
    lead.open();
    assert_eq!(tenant.reply("launch").result, 0);
    let epoch = lead.shut();
    lead.await_drained(pid, epoch);
    assert_eq!(first.snapshot().slots[0].did.launches, 1);
    assert_eq!(second.snapshot().slots[0].did.launches, 0);
    tenant.kill();
    other.await_left(pid);
}
