//! The configuration's file changes while the plugin runs.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tessera_fake_kubelet::{Container, Pod};
use tessera_harness::plugin::{
    GIB, GPU, Simulated, TestNode, bounded, limit, pod, replica, stderr, tessera, until,
};
use tessera_view::status::{Configuration, Status};

/// 40 GiB in parts of 10.
const FOUR: &str = "[gpus]\nreserve = 0\n[share]\nreplicas = 4\n";
/// In parts of 5.
const EIGHT: &str = "[gpus]\nreserve = 0\n[share]\nreplicas = 8\n";

struct Reloading {
    node: TestNode,
    file: PathBuf,
}

impl Reloading {
    async fn start(settings: &str) -> Self {
        let mut node = TestNode::without_plugin(settings).await;
        let file = node.dir.path().join("config.toml");
        std::fs::write(&file, node.config_text()).unwrap();
        node.launch_plugin_on(&file);
        bounded(node.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) > 0)).await;
        Self { node, file }
    }

    fn text(&mut self, settings: &str) -> String {
        settings.clone_into(&mut self.node.settings);
        self.node.config_text()
    }

    /// As an editor does.
    fn write(&mut self, settings: &str) {
        let text = self.text(settings);
        replace(&self.file, &text);
    }

    async fn offered(&self, resource: &str, count: usize) {
        bounded(self.node.kubelet.wait_allocatable(resource, count)).await;
    }

    async fn configuration(&self, look: impl Fn(&Configuration) -> bool) -> Configuration {
        let found = |status: &Status| {
            let configuration = status.plugin.configuration.clone()?;
            look(&configuration).then_some(configuration)
        };
        self.node.status_until(found).await
    }
}

fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, file).unwrap();
}

#[tokio::test]
async fn more_replicas_appear_beside_a_running_pod_as_far_as_there_is_room() {
    let mut it = Reloading::start(FOUR).await;
    it.offered(GPU, 8).await;
    let held = bounded(it.node.kubelet.run(&pod("a", 1))).await.unwrap().remove(0).device_ids;
    let pages = it.node.pages(&held);
    it.write(EIGHT);
    // 10 GiB are held, and seven of 5 do not fit beside them: one waits.
    it.offered(GPU, 15).await;
    assert_eq!(limit(&pages) / GIB, 10, "it keeps what it was given");
    let status = it.node.status().await;
    let reasons: Vec<&str> = status
        .gpus
        .iter()
        .flat_map(|gpu| &gpu.replicas)
        .map(|replica| replica.health_reason.as_str())
        .filter(|reason| !reason.is_empty())
        .collect();
    assert_eq!(reasons, ["no room beside the live limits"]);
    let next = bounded(it.node.kubelet.run(&pod("b", 1))).await.unwrap().remove(0).device_ids;
    assert_eq!(limit(&it.node.pages(&next)) / GIB, 5, "who comes has the new one");
    it.node.kubelet.remove("default", "a");
    it.offered(GPU, 16).await;
}

#[tokio::test]
async fn fewer_replicas_retire_and_the_held_ones_stay_until_their_pods_end() {
    let mut it = Reloading::start(EIGHT).await;
    it.offered(GPU, 16).await;
    let all: Vec<String> = (0..8).map(|n| replica(0, n)).collect();
    it.node.allocate(&all[7..]).await.unwrap();
    it.node.pre_start(&all[7..]).await.unwrap();
    it.write(FOUR);
    // 5 held, and three of 10 beside them.
    it.offered(GPU, 7).await;
    let listed: Vec<String> = it.node.kubelet.devices(GPU).into_iter().map(|d| d.id).collect();
    assert!(listed.contains(&all[7]) && !listed.contains(&all[6]), "{listed:?}");
    let refused = it.node.allocate(&all[6..7]).await.unwrap_err();
    assert!(refused.message().contains("retired"), "{refused}");
    it.node.pre_start(&all[7..]).await.unwrap();
    assert_eq!(limit(&it.node.pages(&all[7..])) / GIB, 5);
}

#[tokio::test]
async fn another_name_is_served_and_the_old_one_as_long_as_it_is_held() {
    let mut it = Reloading::start(FOUR).await;
    it.offered(GPU, 8).await;
    bounded(it.node.kubelet.run(&pod("a", 1))).await.unwrap();
    it.write(&format!("{FOUR}[resource]\nname = \"x.dev/other\"\n"));
    it.offered("x.dev/other", 7).await;
    bounded(it.node.kubelet.wait_until(|kubelet| kubelet.devices(GPU).len() == 1)).await;
    it.node.kubelet.remove("default", "a");
    // An answer without any pod would release nothing.
    let alive = Pod::new("default", "b").with(Container::new("main").asking("x.dev/other", 1));
    bounded(it.node.kubelet.run(&alive)).await.unwrap();
    bounded(it.node.kubelet.wait_until(|kubelet| kubelet.endpoint(GPU).is_none())).await;
    it.offered("x.dev/other", 8).await;
}

#[tokio::test]
async fn a_bad_file_is_refused_loudly_and_the_last_good_one_stays() {
    let mut it = Reloading::start(FOUR).await;
    it.offered(GPU, 8).await;
    let good = it.configuration(|c| c.errors.is_empty()).await;
    it.write("[share]\nreplicas = 0\nmemroy = \"4Gi\"\n");
    let bad = it.configuration(|c| c.errors.len() == 2).await;
    assert!(bad.errors[0].contains("config.toml:2: share.replicas: must be from 1"), "{bad:?}");
    assert_eq!((bad.refused, &bad.hash), (1, &good.hash));
    // So is one that no GPU of this node has the memory for.
    it.write("[share]\nreplicas = 4\nmemory = \"30Gi\"\n");
    let bad = it.configuration(|c| c.refused == 2).await;
    assert!(bad.errors[0].contains("share.memory"), "{bad:?}");
    let warnings = it.node.status().await.warnings;
    let expected = "the configuration file is bad, and the last good configuration stays in force";
    assert!(warnings.iter().any(|warning| warning.contains(expected)), "{warnings:?}");
    assert_eq!(it.node.kubelet.allocatable(GPU), 8);
    // And where it is gone.
    std::fs::remove_file(&it.file).unwrap();
    it.configuration(|c| c.refused == 3).await;
    assert_eq!(it.node.kubelet.allocatable(GPU), 8);
    it.write(EIGHT);
    it.offered(GPU, 16).await;
    let mended = it.configuration(|c| c.errors.is_empty()).await;
    assert!(mended.succeeded_unix_ms >= bad.attempted_unix_ms && mended.hash != good.hash);
    assert!(it.node.status().await.warnings.iter().all(|w| !w.contains("is bad")));
}

#[tokio::test]
async fn a_config_maps_update_is_noticed() {
    let mut node = TestNode::without_plugin(FOUR).await;
    let mount = node.dir.path().join("etc");
    let version = |name: &str, text: &str| {
        std::fs::create_dir_all(mount.join(name)).unwrap();
        std::fs::write(mount.join(name).join("config.toml"), text).unwrap();
        // As kubelet's AtomicWriter has it.
        std::os::unix::fs::symlink(name, mount.join("..data_tmp")).unwrap();
        std::fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
    };
    version("..2026_1", &node.config_text());
    std::os::unix::fs::symlink("..data/config.toml", mount.join("config.toml")).unwrap();
    node.launch_plugin_on(&mount.join("config.toml"));
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    for (n, (settings, count)) in [(EIGHT, 16), (FOUR, 8)].into_iter().enumerate() {
        settings.clone_into(&mut node.settings);
        version(&format!("..2026_{}", n + 2), &node.config_text());
        bounded(node.kubelet.wait_allocatable(GPU, count)).await;
    }
}

#[tokio::test]
async fn what_takes_a_restart_stays_as_it_was_and_is_reported() {
    let mut it = Reloading::start(FOUR).await;
    it.offered(GPU, 8).await;
    let elsewhere = it.node.dir.path().join("elsewhere").display().to_string();
    let text = it.text(EIGHT).replace("tmpfs = \"off\"", "tmpfs = \"prefer\"");
    let pages = it.node.dir.path().join("pages").display().to_string();
    replace(&it.file, &text.replace(&format!("{pages}\""), &format!("{elsewhere}\"")));
    it.offered(GPU, 16).await;
    let waiting = it.configuration(|c| !c.waiting_keys.is_empty()).await.waiting_keys;
    assert_eq!(waiting, ["paths.pages", "pages.tmpfs"]);
    let warnings = it.node.status().await.warnings;
    let expected =
        format!("take a restart of the plugin: paths.pages: \"{pages}\" → \"{elsewhere}\"");
    assert!(warnings.iter().any(|warning| warning.contains(&expected)), "{warnings:?}");
    let held = bounded(it.node.kubelet.run(&pod("a", 1))).await.unwrap().remove(0).device_ids;
    assert_eq!(limit(&it.node.pages(&held)) / GIB, 5, "its pages are where they were");
}

#[tokio::test]
async fn gpus_are_left_out_and_taken_in_again() {
    let mut it = Reloading::start(FOUR).await;
    it.offered(GPU, 8).await;
    it.node.allocate(&[replica(1, 0)]).await.unwrap();
    it.node.pre_start(&[replica(1, 0)]).await.unwrap();
    it.write("[gpus]\nreserve = 0\nexclude = [\"1\"]\n[share]\nreplicas = 4\n");
    it.offered(GPU, 4).await;
    assert!(it.node.allocate(&[replica(1, 1)]).await.is_err());
    it.node.pre_start(&[replica(1, 0)]).await.unwrap();
    it.write("[gpus]\nreserve = 0\nexclude = [\"*\"]\n[share]\nreplicas = 4\n");
    it.offered(GPU, 0).await;
    it.write(FOUR);
    it.offered(GPU, 8).await;
}

// The configuration's file and the plugin as a process: signals, restarts, and the commands.

fn hang_up(node: &Simulated) {
    let pid = i32::try_from(node.plugin.as_ref().unwrap().id()).unwrap();
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGHUP).unwrap();
}

fn configuration(node: &Simulated) -> Value {
    node.json()["plugin"]["configuration"].clone()
}

/// What `config plan` says of a file that it reads from standard input.
fn plan(node: &Simulated, output: &str, text: &str) -> (Option<i32>, String) {
    let mut command = node.command();
    command.args(["config", "plan", "-", "-o", output]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[tokio::test]
async fn a_plugin_that_starts_with_a_bad_file_goes_on_with_the_last_good_one() {
    let mut node = Simulated::serving().await;
    node.start_pod("a", 1).await;
    let good = configuration(&node)["hash"].clone();
    // The file cannot be read, and so does not say where the ledger is, which is in the state directory.
    node.envs = vec![("TESSERA_STATE_DIR", node.dir.path().as_os_str().to_owned())];
    let (file, aside) = (node.file(), node.dir.path().join("aside"));
    let breaks: [&dyn Fn(); 4] = [
        &|| std::fs::rename(&file, &aside).unwrap(),
        &|| std::fs::create_dir(&file).unwrap(),
        &|| std::fs::write(&file, b"\xff\xfe").unwrap(),
        &|| std::fs::write(&file, "[paths\nledger").unwrap(),
    ];
    for (n, damage) in breaks.into_iter().enumerate() {
        assert_eq!(node.terminate().await, Some(0));
        if file.is_dir() {
            std::fs::remove_dir(&file).unwrap();
        }
        damage();
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        // Without a file that can be read, no plugin is asked.
        assert!(n == 3 || node.run(&["status"]).status.code() == Some(64), "{n}");
        let mut status = tessera();
        status.arg("--config").arg(&aside).args(["status", "-o", "json"]);
        let status: Value = serde_json::from_slice(&status.output().unwrap().stdout).unwrap();
        assert_eq!(status["plugin"]["configuration"]["hash"], good, "{n}");
    }
    std::fs::rename(&aside, &file).unwrap();
    // A fraction of a GPU too many, and then not even TOML: as kubelet restarts it with both.
    for (from, to) in [("replicas = 4", "replicas = 4\nmemory = \"70Gi\""), ("[share]", "[share")] {
        node.configure(from, to);
        assert_eq!(node.terminate().await, Some(0));
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        let state = configuration(&node);
        assert_eq!(state["hash"], good);
        assert!(!state["errors"].as_array().unwrap().is_empty(), "{state}");
        assert!(node.run(&["status", "--ready"]).status.success(), "probes need no good file");
        let reloaded = node.run(&["config", "reload"]);
        assert_eq!(reloaded.status.code(), Some(64), "{}", stderr(&reloaded));
    }
    // Without a last good one there is nothing to start with.
    node.terminate().await;
    let kept = node.dir.path().join("ledger.redb.config.toml");
    std::fs::remove_file(kept).unwrap();
    let refused = node.run(&["serve"]);
    assert_eq!(refused.status.code(), Some(64));
    assert!(stderr(&refused).contains("config.toml:1: "), "{}", stderr(&refused));
}

#[tokio::test]
async fn sighup_and_the_command_have_the_file_read_again() {
    let mut node = Simulated::serving().await;
    node.configure("replicas = 4", "replicas = 8");
    hang_up(&node);
    bounded(node.kubelet.wait_allocatable(GPU, 16)).await;
    node.configure("replicas = 8", "replicas = 2\n[log]\nfilter = \"debug\"\nformat = \"json\"");
    let answer = node.run(&["config", "reload", "-o", "json"]);
    assert_eq!(answer.status.code(), Some(0), "{}", stderr(&answer));
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    // The file's own news may have come first.
    assert!(answer["configuration"]["errors"].as_array().unwrap().is_empty(), "{answer}");
    assert_eq!(answer["configuration"]["waiting_keys"], serde_json::json!(["log.format"]));
    let log = std::fs::read_to_string(node.dir.path().join("log")).unwrap();
    assert!(log.contains("DEBUG"), "the filter took effect: {log}");
    assert_eq!(node.terminate().await, Some(0));
    let away = node.run(&["config", "reload"]);
    assert_eq!(away.status.code(), Some(69), "{}", stderr(&away));
}

#[tokio::test]
async fn a_plan_tells_what_would_change_and_changes_nothing() {
    let mut node = Simulated::new("replicas = 4\nmemory = \"2Gi\"").await;
    node.serve().await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    node.start_pod("a", 1).await;
    until(|| (!node.json()["allocations"][0]["holder"].is_null()).then_some(())).await;
    let text = std::fs::read_to_string(node.file()).unwrap();
    let new = node.dir.path().join("new.toml");
    let other =
        "replicas = 2\nmemory = \"4Gi\"\n[compute]\nquantum = \"8ms\"\n[log]\nformat = \"json\"";
    std::fs::write(&new, text.replace("replicas = 4\nmemory = \"2Gi\"", other)).unwrap();
    let new = new.display().to_string();

    let asked = node.run(&["config", "plan", &new, "-o", "json"]);
    assert_eq!(asked.status.code(), Some(0), "{}", stderr(&asked));
    let planned: Value = serde_json::from_slice(&asked.stdout).unwrap();
    let keys: Vec<&str> =
        planned["changes"].as_array().unwrap().iter().map(|c| c["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["share.replicas", "share.memory", "compute.quantum", "log.format"]);
    let share = &planned["shares"][0];
    assert_eq!((&share["retire"], &share["before"]["replicas"]), (&2.into(), &4.into()), "{share}");
    let effects = planned["allocations"][0]["effects"].to_string();
    for part in ["keeps 2 GiB, 25% burst", "gets 4 GiB, 50% burst", "at once: compute.quantum"] {
        assert!(effects.contains(part), "{part}: {effects}");
    }
    let shown = String::from_utf8(node.run(&["config", "plan", &new]).stdout).unwrap();
    assert!(shown.contains("default/a (main)") && shown.contains("4 → 2"), "{shown}");
    assert_eq!(node.kubelet.allocatable(GPU), 8);

    // A bad one, from standard input.
    let (status, shown) = plan(&node, "text", "[share]\nreplicas = 999\n");
    assert_eq!(status, Some(64));
    assert!(shown.contains("(standard input):2: share.replicas: must be from 1"), "{shown}");

    node.terminate().await;
    let away = node.run(&["config", "plan", &new]);
    assert_eq!(away.status.code(), Some(69), "{}", stderr(&away));
}

#[tokio::test]
async fn a_part_of_a_file_is_planned_with_what_it_says_and_the_rest_by_name() {
    let node = Simulated::serving().await;
    let plan = |output: &str| plan(&node, output, "[share]\nreplicas = 2\n").1;
    let text = plan("text");
    let said = text.split("NOT IN THE FILE").next().unwrap();
    assert!(said.contains("share.replicas") && !said.contains("paths."), "{text}");
    let rest = text.split("NOT IN THE FILE, SO BACK TO THE DEFAULT\n").nth(1).unwrap();
    let rest: Vec<&str> = rest.lines().take_while(|line| !line.is_empty()).collect();
    assert!(rest.join(" ").contains("after a restart: cdi.directory, paths."), "{text}");
    assert!(rest.len() < 9, "names, and no line for each: {text}");
    // Its values are in the JSON.
    let json: Value = serde_json::from_str(&plan("json")).unwrap();
    let changes = json["changes"].as_array().unwrap();
    let change = |key: &str| changes.iter().find(|change| change["key"] == key).unwrap();
    assert_eq!(change("share.replicas")["absent"], false);
    assert_eq!(change("paths.admin")["absent"], true);
    assert!(change("paths.admin")["before"].is_string());
}

#[test]
fn completions_and_the_reference_are_printed_whatever_the_configuration() {
    let tessera = |args: &[&str]| {
        let mut command = tessera_harness::plugin::tessera();
        let output = command.args(["-c", "/nonexistent.toml"]).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    // What the shells call, by which this program answers with names (`names`).
    for (shell, part) in [
        ("bash", "_clap_complete_tessera()"),
        ("zsh", "#compdef tessera"),
        ("fish", "--command tessera"),
    ] {
        assert!(tessera(&["completions", shell]).contains(part), "{shell}");
    }
    assert!(tessera(&["config", "reference"]).contains("| `share.replicas` |"));
}
