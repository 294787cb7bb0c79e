//! Limits that change under running processes: the plugin as it is shipped, steered by its command line,
//! and tenants under the shim on a simulated GPU. The allocations are adopted from their pages, so no
//! kubelet is needed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tessera_harness::{
    GIB, MIB, Owned, Pages, Preloaded, Running, SimGpu, artefacts, own_paths, settles, workspace,
};
use tessera_region::layout::PAGES_DIR_ENV;
use tessera_region::quota::{GpuQuota, Policy};

use crate::{text, until};

const ONE: &str = "11111111111111111111111111111111";
const TWO: &str = "22222222222222222222222222222222";

/// A node without a kubelet.
struct Node {
    /// Ends before what it works on goes.
    plugin: Option<Owned>,
    sim: SimGpu,
    dir: TempDir,
}

impl Node {
    /// With an allocation of 1 GiB and half of GPU 0 under each of these ids.
    fn start(ids: &[&str]) -> Self {
        let (sim, dir) = (SimGpu::start_default(), tempfile::tempdir().expect("a writable /tmp"));
        let (shim, nvml, kubelet) =
            (artefacts().shim(), artefacts().libnvml(), dir.path().join("kubelet"));
        let paths = own_paths(
            dir.path(),
            &[("shim_source", &shim), ("nvml", &nvml), ("kubelet", &kubelet)],
        );
        let config = format!(
            "[gpus]\nreserve = 0\ncontext_overhead = \"64Mi\"\n[share]\nreplicas = 4\n\
             [metrics]\nlisten = \"\"\n[api]\nlisten = \"\"\n{paths}"
        );
        std::fs::write(dir.path().join("config.toml"), config).expect("just made");
        std::fs::create_dir(kubelet).expect("just made");
        let mut node = Self { plugin: None, sim, dir };
        for id in ids {
            let gpu = GpuQuota {
                uuid: node.sim.uuid(0).to_owned(),
                memory_limit_bytes: GIB,
                context_overhead_bytes: 64 * MIB,
                cores_millis: 500,
                policy: Policy::Burst,
            };
            std::fs::create_dir_all(node.pages(id)).expect("just made");
            Pages::of(&node.pages(id), id, vec![gpu]);
        }
        node.serve();
        node
    }

    fn pages(&self, id: &str) -> PathBuf {
        self.dir.path().join("pages").join(id)
    }

    fn tessera(&self, args: &[&str]) -> Command {
        let mut command = Command::new(artefacts().tessera());
        command.arg("--config").arg(self.dir.path().join("config.toml")).args(args);
        command.envs(self.sim.envs()).stdin(Stdio::null());
        command
    }

    fn serve(&mut self) {
        self.plugin = Some(Owned(self.tessera(&["serve"]).spawn().expect("tessera starts")));
        until("no allocations", || {
            self.says(&["quota", "show", "-o", "json"]).0.contains(ONE).then_some(())
        });
    }

    /// What a command says on standard output, on standard error, and its exit status.
    fn says(&self, args: &[&str]) -> (String, String, Option<i32>) {
        let Output { stdout, stderr, status } =
            self.tessera(args).output().expect("tessera starts");
        (text(&stdout), text(&stderr), status.code())
    }

    fn must(&self, args: &[&str]) -> String {
        let (out, err, status) = self.says(args);
        assert_eq!(status, Some(0), "{args:?}: {err}");
        out
    }

    fn tenant(&self, program: &Path, id: &str) -> Preloaded {
        Preloaded::new(program).sim(&self.sim).env(PAGES_DIR_ENV, self.pages(id))
    }

    fn load(&self, id: &str) -> Running {
        // Longer than all judgements on a busy machine; it is killed with the value.
        let tenant = self.tenant(&artefacts().tenant(), id).timeout(Duration::from_secs(1000));
        tenant.arg("load").arg("--kernel-us=500").arg("--for=1000").spawn()
    }

    /// GPU time that these processes get in a while, nanoseconds each.
    fn worked(&self, pids: &[u32], length: Duration) -> Vec<u64> {
        let look = || pids.iter().map(|pid| self.sim.worked(0, *pid).ns).collect::<Vec<_>>();
        let before = look();
        std::thread::sleep(length);
        look().iter().zip(before).map(|(after, before)| after - before).collect()
    }
}

/// The client that `docs/steering.md` names.
#[test]
fn a_python_client_steers_as_the_documentation_says() {
    let client = workspace().join("tests/python/admin_client.py");
    let node = Node::start(&[ONE]);
    let run = |gibibytes: &str| {
        let mut command = Command::new("python3");
        command.arg("-B").arg(&client).arg(node.dir.path().join("admin.sock"));
        let out = command.args([ONE, gibibytes]).output();
        out.expect("Python starts")
    };
    let said = run("2");
    assert!(said.status.success(), "{}", text(&said.stderr));
    let uuid = node.sim.uuid(0);
    let want = format!("{ONE} {uuid} {GIB}\n{uuid} {GIB} -> {}\n", 2 * GIB);
    assert_eq!(text(&said.stdout), want);
    assert!(node.must(&["quota", "show"]).contains("2 GiB"));
    // A refusal has its code and says what is possible.
    let refused = run("4000");
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("422: "), "{}", text(&refused.stderr));
}

#[test]
fn gpu_time_is_divided_again_and_capped_under_running_processes() {
    let node = Node::start(&[ONE, TWO]);
    let (first, second) = (node.load(ONE), node.load(TWO));
    let pids = [first.pid(), second.pid()];
    let both_run = || !node.worked(&pids, Duration::from_millis(50)).contains(&0);
    until("they do not run side by side", || both_run().then_some(()));
    // Of what the two get, the first's part in percent.
    let part = || {
        let got = node.worked(&pids, Duration::from_secs(1));
        got[0] * 100 / got.iter().sum::<u64>().max(1)
    };
    settles("percent, of 50", &(35..=65), part);
    node.must(&["quota", "set", TWO, "--cores", "10"]);
    node.must(&["quota", "set", ONE, "--cores", "90"]);
    settles("percent, of 90", &(75..=100), part);

    // A cap, with nobody in its way.
    drop(second);
    node.must(&["quota", "set", ONE, "--cores", "20", "--policy", "strict"]);
    let of_the_time = || {
        let begun = Instant::now();
        let got = u128::from(node.worked(&pids[..1], Duration::from_secs(1))[0]);
        u64::try_from(got * 100 / begun.elapsed().as_nanos()).expect("a percentage")
    };
    settles("percent of the time, capped at 20", &(10..=30), of_the_time);
    // Nobody divides it; and again.
    node.must(&["quota", "set", ONE, "--policy", "none"]);
    settles("percent of the time, undivided", &(50..=100), of_the_time);
    node.must(&["quota", "set", ONE, "--policy", "strict"]);
    settles("percent, after the second change of policy", &(10..=30), of_the_time);
}
