//! What a lone tenant uses: the plugin asks the simulated driver, and the simulator has its own account of it.

use std::process::{Command, Stdio};

use serde_json::Value;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod};
use tessera_harness::{Owned, artefacts};

/// The tenant program's, which takes its duration as an argument.
const KERNEL: &str = "[[kernel]]\nname = \"spin_ns\"\nparameter = 0\n";

/// A pod alone on this GPU whose process works for a tenth of the time.
struct Lone {
    node: Simulated,
    _process: Owned,
}

impl Lone {
    async fn on(gpu: &str, settings: &str) -> Self {
        let mut node = Simulated::on(&format!("[[gpu]]\n{gpu}\n{KERNEL}"), settings).await;
        node.launch();
        bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
        let admitted = node.kubelet.run(&pod("alone", 1)).await.unwrap().remove(0);
        let mut load = node.tenant(&admitted.device_ids);
        load.envs(&admitted.response.envs);
        load.args(["--device", &admitted.response.envs["NVIDIA_VISIBLE_DEVICES"]]);
        load.args(["load", "--kernel-us", "2000", "--kernels", "1", "--rate", "50"]);
        let process = load.stdout(Stdio::null()).spawn().unwrap();
        Lone { node, _process: Owned(process) }
    }

    fn compute(&self) -> Value {
        self.node.json()["allocations"][0]["compute"].clone()
    }

    /// Waits until it has had this, microseconds, and what it had then.
    fn until(&self, figure: &str, us: u64) -> Value {
        loop {
            let compute = self.compute();
            if compute[figure].as_u64() > Some(us) {
                return compute;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    /// The simulator's time, and how long its GPU was busy.
    fn account(&self) -> [f64; 2] {
        let mut ctl = self.node.on_machine(Command::new(artefacts().simgpu_ctl()));
        let out = ctl.arg("account").output().unwrap();
        let line = String::from_utf8(out.stdout).unwrap();
        let account: Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        [&account["now_ns"], &account["busy_ns"]].map(|ns| ns.as_f64().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_pod_used_what_the_simulator_says_and_not_all_that_it_had_leased() {
    let lone = Lone::on("memory = \"16GiB\"", "").await;
    let first = lone.until("measured_us", 0);
    let begin = lone.account();
    // The same ten seconds, but for the time that a look takes.
    let second = lone.until("measured_us", first["measured_us"].as_u64().unwrap());
    let end = lone.account();
    let grown = |name: &str| second[name].as_f64().unwrap() - first[name].as_f64().unwrap();
    let used = grown("used_us") / grown("measured_us");
    let busy = (end[1] - begin[1]) / (end[0] - begin[0]);
    assert!((used - busy).abs() <= 0.02, "used {used}, busy {busy}: {second}");
    let shown = second["used_10s_millis"].as_f64().unwrap() / 1000.0;
    assert!((shown - busy).abs() <= 0.02, "shown {shown}, busy {busy}: {second}");
    assert_eq!(second["gate"], "solo");
    assert!(second["got_10s_millis"].as_u64() > Some(900), "leased: {second}");
    assert!((0.05..0.2).contains(&busy), "{busy}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_pod_on_an_instance_used_nobody_knows_how_much() {
    let mig = "memory = \"16GiB\"\nmig = [\"1g.4gb\"]";
    let lone = Lone::on(mig, "").await;
    // The driver was asked twice.
    let compute = lone.until("leased_us", 21_000_000);
    assert_eq!(compute["used_10s_millis"], Value::Null, "{compute}");
    assert_eq!([&compute["used_us"], &compute["measured_us"]], [&0, &0], "{compute}");
    let status = String::from_utf8(lone.node.run(&["status"]).stdout).unwrap();
    assert!(status.contains(" ? "), "{status}");
}
