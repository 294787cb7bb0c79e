//! `tessera sandbox`: pods are held to their quota, what goes leaves nothing, and what is wrong is said.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tempfile::TempDir;
use tessera_harness::{GIB, Owned, artefacts, external, workspace};

use crate::{ends, said, until};

fn temporary() -> TempDir {
    tempfile::tempdir().expect("a writable temporary directory")
}

fn command(tmp: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(artefacts().tessera());
    command.args(args).env("TMPDIR", tmp.path()).stdin(Stdio::null());
    command
}

/// A sandbox that stays up; its temporary files are in a directory of their own.
struct Sandbox {
    child: Owned,
    tmp: TempDir,
    out: Arc<Mutex<String>>,
}

impl Sandbox {
    fn start(args: &[&str]) -> Self {
        let tmp = temporary();
        let mut child = command(&tmp, &[&["sandbox"], args].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("tessera starts");
        let (out, lines) = (Arc::default(), child.stdout.take().expect("piped"));
        let heard: Arc<Mutex<String>> = Arc::clone(&out);
        std::thread::spawn(move || {
            for line in BufReader::new(lines).lines().map_while(Result::ok) {
                heard.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        let mut sandbox = Self { child: Owned(child), tmp, out };
        until("it does not stand", || {
            assert!(sandbox.child.try_wait().unwrap().is_none(), "{}", sandbox.out());
            sandbox.out().contains("Ctrl-C ends").then_some(())
        });
        sandbox
    }

    fn out(&self) -> String {
        self.out.lock().unwrap().clone()
    }

    /// Where its page is served.
    fn page(&self) -> String {
        let out = self.out();
        let line = out.lines().find_map(|line| line.strip_prefix("page")).expect("a page");
        line.split("http://").nth(1).expect("its address").trim_end_matches('/').to_owned()
    }

    /// Asks it from another terminal.
    fn ask(&self, args: &[&str]) -> Output {
        command(&self.tmp, &[&["sandbox"], args].concat()).output().expect("tessera starts")
    }

    fn must(&self, args: &[&str]) -> String {
        let output = self.ask(args);
        assert!(output.status.success(), "{args:?}: {}", said(&output));
        said(&output)
    }

    fn dir(&self) -> PathBuf {
        let mut entries = std::fs::read_dir(self.tmp.path()).unwrap();
        entries.next().expect("its directory").unwrap().path()
    }

    /// What `tessera status -o json` prints of its only node.
    fn status(&self) -> Value {
        let config = self.dir().join("n0/config.toml");
        let config = config.display().to_string();
        let output = command(&self.tmp, &["-c", &config, "status", "-o", "json"]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)))
    }

    fn interrupt(&mut self) -> Option<i32> {
        // SAFETY: kill(2) of a child of ours that was not waited for.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGINT) };
        until("it does not end", || self.child.try_wait().unwrap()).code()
    }

    /// Neither files nor processes that name its directory.
    fn left_nothing(&self, dir: &Path) {
        until("something is left", || {
            let files = std::fs::read_dir(self.tmp.path()).unwrap().count();
            (files == 0 && processes(dir).is_empty()).then_some(())
        });
    }
}

/// Processes whose environment or command line names this directory.
fn processes(dir: &Path) -> Vec<String> {
    let name = dir.display().to_string();
    let names = |file: &str, pid: &str| {
        let text = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&text).contains(&name)
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().into_string().ok());
    pids.filter(|pid| pid.bytes().all(|b| b.is_ascii_digit()))
        .filter(|pid| names("environ", pid) || names("cmdline", pid))
        .collect()
}

fn get(url_host: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(url_host).expect("somebody listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {url_host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_greedy_pod_is_held_to_its_quota_and_a_removed_one_leaves_nothing() {
    let mut sandbox = Sandbox::start(&["--memory", "8Gi"]);
    sandbox.must(&["run", "hog", "--load", "greedy", "-n", "team"]);
    sandbox.must(&["run", "chat"]);
    let status = sandbox.status();
    let of = |pod: &str| {
        let mut all = status["allocations"].as_array().unwrap().iter();
        all.find(|one| one.to_string().contains(pod)).cloned().expect("it is named")
    };
    let hog = of("hog");
    let (limit, charged) =
        (&hog["gpus"][0]["memory_limit_bytes"], &hog["gpus"][0]["memory_charged_bytes"]);
    assert!(charged.as_u64() <= limit.as_u64() && charged.as_u64() > Some(GIB), "{hog}");
    assert!(hog["refusals"].as_u64() > Some(0), "{hog}");
    // Quota and use are what `explain` says too.
    assert!(sandbox.must(&["explain", "chat"]).contains("default/chat"));

    let dir = sandbox.dir();
    sandbox.must(&["rm", "team/hog"]);
    assert!(!sandbox.must(&["list"]).contains("hog"));
    until("its memory or its pages stay", || {
        let pages = std::fs::read_dir(dir.join("n0/pages")).unwrap().flatten();
        let pages = pages.filter(|entry| entry.file_name().len() == 32).count();
        let all = sandbox.status()["allocations"].as_array().unwrap().len();
        (pages == 1 && all == 1).then_some(())
    });
    let left: Vec<_> = std::fs::read_dir(dir.join("pods")).unwrap().flatten().collect();
    assert!(
        left.iter().all(|entry| !entry.file_name().to_string_lossy().contains("hog")),
        "{left:?}"
    );

    assert_eq!(sandbox.interrupt(), Some(0));
    sandbox.left_nothing(&dir);
}

#[test]
fn each_pod_has_a_log_of_its_own_and_is_called_as_it_is_listed() {
    let sandbox = Sandbox::start(&[]);
    for (name, namespace) in [("chat", "team"), ("batch", "team"), ("chat", "other")] {
        let words = format!("I am {namespace}/{name}");
        sandbox.must(&["run", name, "--namespace", namespace, "--", "echo", &words]);
        sandbox.must(&["wait", &format!("{namespace}/{name}")]);
    }
    let logs = |name: &str| sandbox.must(&["logs", name]);
    for name in ["team/chat", "team/batch", "other/chat"] {
        assert_eq!(logs(name).trim(), format!("I am {name}"));
    }
    sandbox.must(&["rm", "team/chat"]);
    assert_eq!(logs("team/batch").trim(), "I am team/batch");
    let listed = sandbox.must(&["list"]);
    assert!(listed.contains("team/batch") && !listed.contains("team/chat"), "{listed}");
    // Without a node that serves claims, the error says how to have one.
    ends(&sandbox.ask(&["run", "chat", "--claim", "memory=1Gi"]), 1, &["--dra"]);
}

#[test]
fn a_killed_sandbox_leaves_neither_processes_nor_files() {
    let mut sandbox = Sandbox::start(&[]);
    let dir = sandbox.dir();
    sandbox.must(&["run", "hog", "--load", "greedy"]);
    // A program that has descendants, which no signal to its parent ends.
    sandbox.must(&["run", "mine", "--", "sh", "-c", "(setsid sleep 1000 &) ; sleep 1000"]);
    assert!(processes(&dir).len() >= 6, "{:?}", processes(&dir));
    sandbox.child.kill().unwrap();
    sandbox.child.wait().unwrap();
    sandbox.left_nothing(&dir);
}

#[test]
fn two_sandboxes_stand_side_by_side_and_a_named_directory_stays() {
    let first = Sandbox::start(&["--layout", "2x1"]);
    let kept = temporary();
    let name = kept.path().join("kept").display().to_string();
    let mut second = Sandbox::start(&["--dir", &name]);
    first.must(&["run", "a", "--node", "n1"]);
    // One page is over all nodes, and who asks need not know on which a pod is.
    until("the page lacks a pod", || {
        get(&first.page(), "/api/v1/fleet").contains("\"pod\":\"a\"").then_some(())
    });
    assert!(first.must(&["explain", "a"]).contains("default/a"));
    // As it prints it.
    let out = second.out();
    let printed = out.lines().find(|line| line.contains(" run chat")).unwrap();
    let printed = printed.replace("run chat", "run b");
    let placed = Command::new("sh").args(["-c", &printed]).output().unwrap();
    assert!(placed.status.success(), "{}", said(&placed));
    let listed = second.must(&["list", "--dir", &name]);
    assert!(listed.contains("default/b") && !listed.contains("default/a"), "{listed}");
    // Nobody takes a directory in which one lives.
    let output = command(&second.tmp, &["sandbox", "--dir", &name]).output().unwrap();
    ends(&output, 1, &["another sandbox lives in"]);
    assert_eq!(second.interrupt(), Some(0));
    assert!(kept.path().join("kept/n0/plugin.log").exists());
    assert!(processes(&kept.path().join("kept")).is_empty());
}

#[test]
fn what_runs_in_a_sandbox_asks_it_by_name_and_ends_it_with_its_status() {
    let tmp = temporary();
    // Another one, which is not meant.
    let other = Sandbox::start(&["--layout", "1x1"]);
    let run = |script: &str| {
        let script = format!("set -e\n{script}");
        let mut command = command(&tmp, &["sandbox", "--", "sh", "-c", &script]);
        command.env("TMPDIR", other.tmp.path()).output().unwrap()
    };
    let good = "tessera sandbox run a --gpu 2 --load idle\n\
                if tessera sandbox run b --gpu 9; then exit 3; fi\n\
                tessera sandbox kill plugin\ntessera sandbox start plugin\ntessera sandbox list\n\
                tessera sandbox run c -- true\ntessera sandbox wait c\ntessera sandbox explain a\n\
                sleep 1000 &\n";
    let output = run(good);
    ends(&output, 0, &["do not fit: n0 has 6 free", "default/a"]);
    let output = run("tessera sandbox list; exit 7");
    ends(&output, 7, &[]);
    let output = run("kill -KILL $$");
    ends(&output, 137, &[]);
    let output = command(&tmp, &["sandbox", "--", "/none/such"]).output().unwrap();
    ends(&output, 1, &["cannot run /none/such"]);
    let left = std::fs::read_dir(other.tmp.path()).unwrap().count();
    assert_eq!(left, 1, "only the other one is left");
}

#[test]
fn gpus_that_cannot_be_are_an_error_of_the_command_line() {
    let tmp = temporary();
    for memory in ["1", "256Mi"] {
        let args = ["sandbox", "--memory", memory, "--", "true"];
        let output = command(&tmp, &args).output().unwrap();
        ends(&output, 64, &["--memory"]);
    }
    let output = command(&tmp, &["sandbox", "--mig", "9=1g.10gb", "--", "true"]).output().unwrap();
    ends(&output, 64, &["GPUs 0 to 1"]);
    // As docs/sandbox.md has it.
    for mig in ["1g.10gb+me,2g.20gb", "0=1g.10gb"] {
        let output = command(&tmp, &["sandbox", "--mig", mig, "--", "true"]).output().unwrap();
        ends(&output, 0, &[]);
    }
}

#[test]
fn a_bad_configuration_says_what_is_wrong_with_it() {
    let tmp = temporary();
    let try_with = |text: &str| {
        let file = tmp.path().join("mine.toml");
        std::fs::write(&file, text).unwrap();
        let file = file.display().to_string();
        let args = ["-c", &file, "sandbox", "--", "true"];
        command(&tmp, &args).output().unwrap()
    };
    let output = try_with("[share]\nreplicas = 4\nmemery = \"1Gi\"\n");
    ends(&output, 64, &["mine.toml:3: share.memery", "did you mean `memory`?"]);
    // What depends on GPUs, in the words of `config check`, of the user's file.
    let output = try_with("[share]\nreplicas = 4\nmemory = \"12Gi\"\n");
    ends(&output, 64, &["mine.toml: share.memory: ", "2 GPUs"]);
    // A good one is tried with its own shares, whatever host it is for.
    let good = "[paths]\nledger = \"/var/lib/elsewhere/l.redb\"\n[metrics]\nlisten = \":9464\"\n\
                [resource]\nname = \"example.com/slice\"\n[share]\nreplicas = 2\n";
    let output = try_with(good);
    ends(&output, 0, &["not used here: [paths], metrics.listen"]);
    assert!(!Path::new("/var/lib/elsewhere").exists());
    let files = std::fs::read_dir(tmp.path()).unwrap().count();
    assert_eq!(files, 1, "only the configuration is left");
}

#[test]
fn a_pod_is_held_to_its_claim_of_any_size() {
    let sandbox = Sandbox::start(&["--dra", "--layout", "1x1"]);
    // What is left out is the device's own default, and odd sizes are rounded up as the scheduler does.
    sandbox.must(&["run", "chat", "--claim", "memory=4000Mi,cores=30", "--load", "greedy"]);
    let status = sandbox.status();
    let chat = &status["allocations"][0];
    assert_eq!(chat["holder"]["pod"], "chat", "{status}");
    assert_eq!(chat["gpus"][0]["memory_limit_bytes"], 4032u64 << 20, "{chat}");
    assert_eq!(chat["gpus"][0]["cores_millis"], 300, "{chat}");
    let refused = || sandbox.status()["allocations"][0]["refusals"].as_u64() > Some(0);
    until("nothing is refused", || refused().then_some(()));
    let output = sandbox.ask(&["run", "large", "--claim", "memory=13Gi"]);
    ends(&output, 1, &["does not fit", "70 % left"]);
    let output = sandbox.ask(&["run", "other"]);
    assert!(said(&output).contains("--claim memory=4Gi"), "{}", said(&output));
    let output = sandbox.ask(&["run", "other", "--claim", "cores=101"]);
    assert!(said(&output).contains("a GPU has 100"), "{}", said(&output));
    // Its container may start again, with the same pages; a removed pod's claim is free.
    sandbox.must(&["restart", "chat"]);
    sandbox.must(&["rm", "chat"]);
    sandbox.must(&["run", "large", "--claim", "memory=13Gi,cores=100"]);
    assert!(sandbox.must(&["list"]).contains("claim memory=13"), "{}", sandbox.must(&["list"]));
}

#[test]
fn what_is_printed_answers() {
    let sandbox =
        Sandbox::start(&["--gpu-name", "NVIDIA H100 80GB HBM3", "--mig", "1=1g.2gb,2g.4gb"]);
    sandbox.must(&["run", "chat"]);
    let out = sandbox.out();
    let metrics = out.split("http://").find(|rest| rest.contains("/metrics")).expect("metrics");
    let host = metrics.split('/').next().unwrap();
    let answer = get(host, "/metrics");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("tessera_") && answer.contains("H100"), "{answer}");
    let page = sandbox.page();
    assert!(get(&page, "/").contains("<html"), "{}", get(&page, "/"));
    let fleet = get(&page, "/api/v1/fleet");
    assert!(fleet.contains("\"pod\":\"chat\"") && fleet.contains("H100"), "{fleet}");
    // Lines are commands as they stand.
    let status = out.lines().find(|line| line.ends_with(" status")).expect("a command");
    let output = Command::new("sh").args(["-c", status]).output().unwrap();
    assert!(said(&output).contains("default/chat"), "{}", said(&output));
    let file = sandbox.dir().join("prometheus.yml");
    assert!(std::fs::read_to_string(file).unwrap().contains(host));
}

/// The recipes of docs/api.md, each with the definition of `api` that stands there, for this address.
fn recipes(host: &str) -> Vec<String> {
    let page = std::fs::read_to_string(workspace().join("docs/api.md")).unwrap();
    let recipes = page.split("## Recipes").nth(1).expect("recipes");
    let mut lines = recipes.lines();
    let definition = lines.find(|line| line.starts_with("api() {")).expect("what `api` is");
    let definition = definition.replace("127.0.0.1:9482", host);
    assert!(definition.contains(host), "{definition}");
    let recipes = lines.filter(|line| line.starts_with("api /"));
    recipes.map(|line| format!("set -euo pipefail\n{definition}\n{line}")).collect()
}

#[test]
fn recipes_of_the_api_run_as_they_are_written() {
    let name = "recipes_of_the_api_run_as_they_are_written";
    let jq = match external::program("jq", "jq") {
        Ok(jq) => jq,
        Err(reason) => return external::skip(name, &reason),
    };
    let Some(_curl) = external::on_path("curl") else {
        return external::skip(name, "no curl on the PATH");
    };
    let sandbox = Sandbox::start(&[]);
    sandbox.must(&["run", "hog", "--load", "greedy", "--namespace", "team"]);
    sandbox.must(&["cordon", "1"]);
    let bin = jq.parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let recipes = recipes(&sandbox.page());
    assert!(recipes.len() > 5, "{recipes:?}");
    for recipe in recipes {
        // The history needs some seconds; that no node is silent is one of the answers.
        let silent = recipe.contains("answers | not");
        until(&recipe, || {
            let output = Command::new("bash")
                .args(["-c", &recipe])
                .env("PATH", &path)
                .env("LD_LIBRARY_PATH", bin.join("../lib/x86_64-linux-gnu"))
                .output()
                .unwrap();
            assert!(output.status.success(), "{recipe}: {}", said(&output));
            let (lines, tabs) = (said(&output), said(&output).contains('\t'));
            assert!(!silent || lines.is_empty(), "{recipe}: {lines}");
            (silent || tabs).then_some(())
        });
    }
}

#[test]
fn trouble_shows_and_goes() {
    let sandbox = Sandbox::start(&[]);
    sandbox.must(&["run", "chat"]);
    sandbox.must(&["lose", "1"]);
    let health = |wanted: &str| {
        until(wanted, || {
            let status = sandbox.status();
            let state =
                status["gpus"][1]["state"].as_str().or(status["gpus"][1]["health"].as_str());
            state.is_some_and(|state| state == wanted).then_some(())
        });
    };
    health("unhealthy");
    // Bad until the driver shows a reset, which this is.
    sandbox.must(&["restore", "1"]);
    health("healthy");
    sandbox.must(&["xid", "1", "79"]);
    health("unhealthy");
    sandbox.must(&["restore", "1"]);
    health("healthy");
    let output = sandbox.ask(&["xid", "9", "79"]);
    ends(&output, 1, &["expected 0 to 1"]);
    for gpu in ["0", "1"] {
        sandbox.must(&["cordon", gpu, "--reason", "try"]);
    }
    let output = sandbox.ask(&["run", "late"]);
    ends(&output, 1, &[]);
    for gpu in ["0", "1"] {
        sandbox.must(&["uncordon", gpu]);
    }
    let listed = sandbox.must(&["list"]);
    let pid = listed.split("pid ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let pid: libc::pid_t = pid.parse().expect("the plugin's pid");
    // SAFETY: kill(2) of a process of this test's sandbox, which waits for it.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    until("it is not reported", || {
        sandbox.out().contains("plugin of n0: does not run").then_some(())
    });
    sandbox.must(&["start", "plugin"]);
    sandbox.must(&["restart", "kubelet"]);
    until("the pod is forgotten", || sandbox.status().to_string().contains("chat").then_some(()));
}

// `tessera demo`: that it passes where quotas hold, and fails where they do not.

fn demo(program: &std::path::Path, tmp: &TempDir) -> Output {
    Command::new(program)
        .args(["demo", "--seconds", "6"])
        .env("TMPDIR", tmp.path())
        .stdin(Stdio::null())
        .output()
        .expect("tessera starts")
}

#[test]
fn quotas_hold_and_nothing_is_left_behind() {
    let tmp = temporary();
    let out = demo(&artefacts().tessera(), &tmp);
    let said = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}\n{}", String::from_utf8_lossy(&out.stderr));
    assert!(said.ends_with("OK: no quota was exceeded\n"), "{said}");
    // What can be looked at on a node is shown.
    assert!(said.contains("$ tessera sandbox explain greedy\ndefault/greedy"), "{said}");
    for tenant in ["chat", "greedy", "crash", "large"] {
        assert!(said.lines().any(|line| line.trim_start().starts_with(tenant)), "{tenant}: {said}");
    }
    // The same load three ways; that Tessera's share helps is part of the exit status.
    for way in ["answer alone", "with Tessera", "without Tessera"] {
        assert!(said.lines().any(|line| line.trim_start().starts_with(way)), "{way}: {said}");
    }
    assert_eq!(std::fs::read_dir(tmp.path()).expect("just made").count(), 0);
}

#[test]
fn a_shim_that_does_nothing_fails_it() {
    let tmp = temporary();
    // An installation whose shim is a library without a single hook.
    let install = temporary();
    let artefacts = artefacts();
    let program = install.path().join("tessera");
    // Copied, because the program looks beside itself, wherever links lead from.
    tessera_harness::copy(&artefacts.tessera(), &program);
    symlink(artefacts.sim_dir(), install.path().join("sim")).expect("a link");
    symlink(artefacts.tenant(), install.path().join("tessera-tenant")).expect("a link");
    let built = Command::new("cc")
        .args(["-shared", "-x", "c", "/dev/null", "-o"])
        .arg(install.path().join("libtessera.so"))
        .status()
        .expect("a C compiler");
    assert!(built.success());
    let out = demo(&program, &tmp);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    // The greedy one gets more than its quota (6), or a neighbour finds no memory (2).
    let expected = ["greedy: its container ended with exit code 6", "ended with exit code 2"];
    assert!(expected.iter().any(|reason| said.contains(reason)), "{said}");
    assert_eq!(std::fs::read_dir(tmp.path()).expect("just made").count(), 0);
}
