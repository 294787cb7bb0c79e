//! MIG instances as GPUs: what NVML and CUDA say of them, and tenants held to quotas on them.

use crate::{OUT_OF_MEMORY, observed, ready, until_free};

use tessera_harness::{Conversation, GIB, MIB, Output, Pages, Preloaded, SimGpu, compile_c};

const NOT_SUPPORTED: &str = "3";

const PARENT: &str = "GPU-7e55e7a0-0000-4000-8000-000000000000";
const SMALL: &str = "MIG-7e55e7a0-0101-4000-8000-000000000000";
const LARGE: &str = "MIG-7e55e7a0-0201-4000-8000-000000000000";

/// GPU 0 with an instance of 2 GiB and one of 4 GiB, GPU 1 whole.
const MACHINE: &str = r#"
[memory]
context_overhead = "64MiB"
module_overhead = "100MiB"
teardown_ms = 1.0

[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000000"
memory = "8GiB"
mig = ["1g.2gb", "2g.4gb"]

[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000001"
memory = "8GiB"
"#;

fn machine() -> SimGpu {
    SimGpu::start(MACHINE)
}

/// What NVML says, without a driver call before.
fn nvml(program: Preloaded) -> Output {
    let out = program.run();
    assert!(out.success(), "{out}");
    out
}

fn bare() -> Preloaded {
    Preloaded::bare(compile_c("instances"))
}

/// A process of the tenant of `pages` on the instance of this UUID.
fn tenant(sim: &SimGpu, pages: &Pages, uuid: &str) -> Conversation {
    let program = Preloaded::new(compile_c("calls")).sim(sim).pages(pages);
    ready(program.env("CUDA_VISIBLE_DEVICES", uuid))
}

// === the simulated machine, bare ===

/// NVML API reference, "Multi Instance GPU Management" and the notes on MIG in "Device Queries".
#[test]
fn nvml_has_handles_of_instances_as_documented() {
    let sim = machine();
    let out = nvml(bare().sim(&sim));
    assert_eq!([out.value("gpu0.mode"), out.value("gpu1.mode")], ["0 1 1", "0 0 0"]);
    // "Returns zero if MIG is not supported or enabled."
    assert_eq!([out.value("gpu0.max"), out.value("gpu1.max")], ["0 7", "0 0"]);
    // "NVML_ERROR_NOT_FOUND if no valid MIG device was found at index", "INVALID_ARGUMENT if index is invalid".
    let handles = ["gpu0:0", "gpu0:1", "gpu0:2", "gpu0:6", "gpu0:7"].map(|key| out.value(key));
    assert_eq!(handles, ["0", "0", "6", "6", "2"]);
    assert_eq!([out.value("gpu0:0.uuid"), out.value("gpu0:1.uuid")], [SMALL, LARGE]);
    assert_eq!(out.value("gpu0:1.name"), "Simulated H200 MIG 2g.4gb");
    // "indices that can be passed to nvmlDeviceGetMigDeviceHandleByIndex".
    assert_eq!([out.value("gpu0:1.index"), out.value("gpu1.index")], ["1", "1"]);
    assert_eq!([out.value("gpu0:1.is_mig"), out.value("gpu0.is_mig")], ["1", "0"]);
    assert_eq!([out.value("gpu0:0.gpu_instance"), out.value("gpu0:1.gpu_instance")], ["1", "2"]);
    assert_eq!(out.value("gpu0:1.compute_instance"), "0");
    assert_eq!(out.value("gpu0:1.parent"), PARENT);
    // "The UUID of the target GPU or MIG instance".
    assert_eq!([out.value("gpu0:1.by_uuid"), out.value("gpu0.by_uuid")], ["0 1", "0 1"]);
    // Multiprocessors, slices of GPU and compute instance, MiB.
    assert_eq!(out.value("gpu0:1.attributes"), "0 32 2 2 4096");
    // "This API currently only supports MIG device handles."
    assert!(out.value("gpu0.attributes").starts_with(NOT_SUPPORTED));
    assert_eq!(out.value("gpu0.gpu_instance"), "error 3");
    // "On MIG-enabled GPUs, querying device utilization rates is not currently supported."
    let utilization = ["gpu0:1", "gpu0", "gpu1"].map(|of| out.value(&format!("{of}.utilization")));
    assert_eq!(utilization, [NOT_SUPPORTED, NOT_SUPPORTED, "0"]);
    // "does not currently support per-instance event reporting using MIG device handles".
    assert_eq!([out.value("gpu0:1.event_types"), out.value("gpu0.event_types")], ["3", "0"]);
    assert_eq!(out.value("gpu0:1.minor"), "error 3");
    // Total, used, free, reserved: an instance's own, and of the GPU.
    let total = 4 * GIB;
    assert_eq!(out.value("gpu0:1.memory"), format!("{total} 0 {total} 0"));
    // An H200's.
    let (total, reserved) = (8 * GIB, 700 * MIB);
    let free = total - reserved;
    assert_eq!(out.value("gpu0.memory"), format!("{total} {reserved} {free} {reserved}"));
}

#[test]
fn nvml_lists_processes_by_instance_and_all_of_them_on_the_gpu() {
    let sim = machine();
    let process = |uuid: &str| {
        let program = Preloaded::bare(compile_c("calls")).sim(&sim);
        let mut process = ready(program.env("CUDA_VISIBLE_DEVICES", uuid));
        process.must("alloc 104857600");
        process
    };
    let (small, large) = (process(SMALL), process(LARGE));
    let out = nvml(bare().sim(&sim));
    let on = |pid: u32, gi: u32| format!("{pid}/{gi}/0/164");
    let (first, second) = (on(small.pid(), 1), on(large.pid(), 2));
    assert_eq!(out.value("gpu0:0.processes"), format!("0 {first}"));
    assert_eq!(out.value("gpu0:1.processes"), format!("0 {second}"));
    // "if device handle is provided, the API returns aggregate information".
    assert_eq!(out.value("gpu0.processes"), format!("0 {first} {second}"));
    assert_eq!(out.value("gpu1.processes"), "0");
    let used = |of: &str| {
        let memory = out.value(&format!("{of}.memory")).split(' ').nth(1).map(str::parse::<u64>);
        memory.unwrap().unwrap()
    };
    assert_eq!(
        [used("gpu0:0"), used("gpu0:1"), used("gpu0")],
        [164, 164, 2 * 164 + 700].map(|n| n * MIB)
    );
}

/// MIG User Guide, "CUDA Device Enumeration"; CUDA Driver API, `cuDeviceGetUuid_v2`.
#[test]
fn cuda_sees_one_instance_and_knows_it_by_its_own_uuid() {
    let sim = machine();
    let seen = |visible: Option<&str>| {
        let program = bare().sim(&sim).arg("cuda");
        nvml(match visible {
            None => program,
            Some(list) => program.env("CUDA_VISIBLE_DEVICES", list),
        })
    };
    // "CUDA will not enumerate non-MIG GPU if any compute instance is enumerated on any other GPU".
    let out = seen(None);
    assert_eq!(out.value("cuda.count"), "1");
    assert_eq!(out.value("cuda0.uuid2"), &SMALL[4..]);
    assert_eq!(out.value("cuda0.uuid1"), &PARENT[4..]);
    assert_eq!(out.value("cuda0.name"), "Simulated H200 MIG 1g.2gb");
    let out = seen(Some(LARGE));
    assert_eq!(out.value("cuda0.uuid2"), &LARGE[4..]);
    assert_eq!(out.value("cuda0.total"), (4 * GIB).to_string());
    assert_eq!(out.value("cuda0.sms"), "32");
    assert_eq!(seen(Some(&format!("{LARGE},{SMALL}"))).value("cuda.count"), "1");
    let out = seen(Some("1"));
    assert_eq!(out.value("cuda0.uuid2"), out.value("cuda0.uuid1"), "a whole GPU");
    // CUDA_ERROR_NO_DEVICE.
    assert_eq!(seen(Some("MIG-00000000-0000-0000-0000-000000000000")).value("cuda.init"), "100");
}

// === tenants ===

#[test]
fn tenants_on_two_instances_of_one_gpu_have_a_quota_each() {
    let sim = machine();
    let (one, two) = (Pages::create(&[(SMALL, GIB)]), Pages::create(&[(LARGE, 3 * GIB)]));
    let (mut small, mut large) = (tenant(&sim, &one, SMALL), tenant(&sim, &two, LARGE));
    assert_eq!([small.must("total 0"), large.must("total 0")], [GIB, 3 * GIB]);
    assert_eq!(small.ask("info").values, [GIB, GIB]);
    small.must("alloc 1073741824");
    assert_eq!(small.ask("alloc 1").result, OUT_OF_MEMORY);
    // It takes nothing from the neighbour, whose quota is larger than that whole instance.
    large.must("alloc 3221225472");
    assert_eq!(large.ask("alloc 1").result, OUT_OF_MEMORY);
    assert_eq!([one.charged(0), two.charged(0)], [GIB, 3 * GIB]);
    let said = small.finish().stderr;
    assert!(said.contains(&format!("on {SMALL} in use")), "{said}");
}

#[test]
fn tenants_of_two_replicas_of_one_instance_share_it() {
    let sim = machine();
    let pages = [900 * MIB, 900 * MIB].map(|limit| Pages::create(&[(SMALL, limit)]));
    let mut tenants = [0, 1].map(|n| tenant(&sim, &pages[n], SMALL));
    for tenant in &mut tenants {
        tenant.must(&format!("alloc {}", 900 * MIB));
        assert_eq!(tenant.ask("alloc 1").result, OUT_OF_MEMORY);
        assert_eq!(tenant.ask("info").values, [0, 900 * MIB]);
    }
    // By NVML, bare: two contexts and two quotas on one instance, nothing on the other.
    let out = nvml(bare().sim(&sim));
    let used = 2 * (900 + 64) * MIB;
    assert_eq!(out.value("gpu0:0.memory"), format!("{} {used} {} 0", 2 * GIB, 2 * GIB - used));
    assert_eq!(out.value("gpu0:1.processes"), "0");
}

#[test]
fn a_gpu_in_mig_mode_shows_its_tenant_the_instances_that_are_its_own() {
    let sim = machine();
    let one = Pages::create(&[(SMALL, GIB)]);
    let both = Pages::create(&[(SMALL, 512 * MIB), (LARGE, 3 * GIB)]);
    let (mut first, mut neighbour) = (tenant(&sim, &one, SMALL), tenant(&sim, &both, LARGE));
    first.must("alloc 104857600");
    neighbour.must("alloc 209715200");
    let memory = |total: u64, used: u64| {
        format!("{} {} {} 0", total * MIB, used * MIB, (total - used) * MIB)
    };

    let out = nvml(Preloaded::new(compile_c("instances")).sim(&sim).pages(&one));
    assert_eq!(out.value("gpu0:0.memory"), memory(1024, 100));
    assert_eq!(
        out.value("gpu0.memory"),
        memory(1024, 100),
        "the GPU shows what it was given of it"
    );
    assert_eq!(out.value("gpu0:1.memory"), "0 0 0 0", "not its own");
    let own = format!("0 {}/1/0/100", first.pid());
    assert_eq!(out.value("gpu0:0.processes"), own);
    assert_eq!(out.value("gpu0.processes"), own);
    assert_eq!(out.value("gpu0:1.processes"), "0", "the neighbour's");
    assert_eq!(out.value("gpu1.memory"), "0 0 0 0");
    // What an instance is made of, and that there is no utilisation, is NVML's word.
    assert_eq!(out.value("gpu0:0.attributes"), "0 16 1 1 2048");
    assert_eq!(out.value("gpu0:0.utilization"), NOT_SUPPORTED);

    let out = nvml(Preloaded::new(compile_c("instances")).sim(&sim).pages(&both));
    assert_eq!(out.value("gpu0:0.memory"), memory(512, 0));
    assert_eq!(out.value("gpu0:1.memory"), memory(3072, 200));
    assert_eq!(out.value("gpu0.memory"), memory(3584, 200), "both together");
    assert_eq!(out.value("gpu0.processes"), format!("0 {}/2/0/200", neighbour.pid()));
}

#[test]
fn an_instance_that_was_not_given_is_refused() {
    let sim = machine();
    let pages = Pages::create(&[(SMALL, GIB)]);
    let program = Preloaded::new(compile_c("calls")).sim(&sim).pages(&pages);
    let mut stranger = Conversation::start(program.env("CUDA_VISIBLE_DEVICES", LARGE));
    stranger.must("init");
    assert_eq!(stranger.must("total 0"), 0);
    assert_eq!(stranger.ask("retain 0").result, 101, "CUDA_ERROR_INVALID_DEVICE");
    assert_ne!(stranger.ask("alloc 1048576").result, 0);
    let said = stranger.finish().stderr;
    assert!(said.contains("was not given") && said.contains(SMALL), "{said}");
}

#[test]
fn what_modules_take_is_seen_on_the_instance_and_counts_there() {
    let sim = machine();
    let mut tenant = observed("calls", &sim, &["--gpu", "0:1"]);
    assert_eq!(tenant.ask("info").values, [(600 - 64) * MIB, 600 * MIB]);
    tenant.must("launch");
    tenant.must("sync");
    // 100 MiB of a module beyond the charges, in steps of 16. NVML's device 0 is the GPU.
    until_free(&mut tenant, (600 - 64 - 112) * MIB);
    assert_eq!(tenant.ask(&format!("alloc {}", 425 * MIB)).result, OUT_OF_MEMORY);
    tenant.must(&format!("alloc {}", 424 * MIB));
    let out = nvml(bare().sim(&sim));
    assert_eq!(out.value("gpu0:1.memory").split(' ').nth(1), Some(&*(588 * MIB).to_string()));
    assert_eq!(out.value("gpu0:0.processes"), "0");
}
