//! Files that are no files: whatever lies at a configured path, no command hangs on it or takes the
//! machine's memory, and a plugin goes on and ends when it is asked to.

use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;
use tessera_config::keys;
use tessera_harness::artefacts;
use tessera_harness::plugin::{
    GPU, Simulated, TestNode, admin, bounded, replica, stderr, tessera, until,
};
use tessera_view::status::{LIVE, STATUS, Status};

/// What a process may take of memory, in all: a few times what the largest file needs.
const MEMORY: &str = "1500000";

/// What a file must not be, and what the error says of it.
const HOSTILE: [(&str, &str); 7] = [
    ("fifo", "is a pipe"),
    ("directory", "is a directory"),
    ("zero", "is a device"),
    ("socket", "is a socket"),
    ("loop", "symbolic link"),
    ("sparse", "larger than"),
    ("newlines", "larger than"),
];

/// Makes it, for as long as the socket that it may be lives.
fn make(kind: &str, at: &Path) -> Option<UnixListener> {
    match kind {
        "fifo" => mkfifo(at, Mode::S_IRWXU).unwrap(),
        "directory" => std::fs::create_dir(at).unwrap(),
        "zero" => symlink("/dev/zero", at).unwrap(),
        "socket" => return Some(UnixListener::bind(at).unwrap()),
        "loop" => symlink(at, at).unwrap(),
        "sparse" => std::fs::File::create(at).unwrap().set_len(10 << 30).unwrap(),
        "newlines" => std::fs::write(at, vec![b'\n'; 20 << 20]).unwrap(),
        "missing" => {}
        "unreadable" => {
            std::fs::write(at, "secret").unwrap();
            std::fs::set_permissions(at, PermissionsExt::from_mode(0o000)).unwrap();
        }
        other => panic!("{other}"),
    }
    None
}

fn unmake(at: &Path) {
    if at.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
        std::fs::remove_dir(at).unwrap();
    } else {
        std::fs::remove_file(at).unwrap();
    }
}

/// The command with little memory to take; a panic if it does not end.
async fn ended(command: &Command) -> Output {
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit -v {MEMORY}; exec \"$@\""), "sh"]);
    limited.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        limited.env(name, value.unwrap_or_default());
    }
    let child = limited.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let ends = async {
        while child.try_wait().unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(tessera_harness::PATIENCE, ends).await.is_err() {
        child.kill().unwrap();
        child.wait().unwrap();
        panic!("{command:?} hangs");
    }
    child.wait_with_output().unwrap()
}

fn signal(node: &Simulated, signal: Signal) {
    let pid = i32::try_from(node.plugin.as_ref().unwrap().id()).unwrap();
    kill(Pid::from_raw(pid), signal).unwrap();
}

#[tokio::test]
async fn no_command_hangs_on_a_configuration_that_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, said) in HOSTILE {
        let file = dir.path().join("config.toml");
        let _kept = make(kind, &file);
        for (args, code) in [
            (&["config", "check"][..], 64),
            // Another plugin than the one meant is not asked.
            (&["config", "plan", "-"], 64),
            (&["status"], 64),
            (&["status", "--live"], 64),
            (&["config", "reload"], 64),
            (&["serve"], 64),
            (&["prepare-host"], 64),
            (&["labels"], 64),
            (&["run", "-m", "1Gi", "true"], 64),
        ] {
            let mut command = tessera();
            // Where the last good configuration of another plugin would be looked for.
            command.env("TESSERA_STATE_DIR", dir.path()).arg("-c").arg(&file).args(args);
            let output = ended(&command).await;
            let reported = stderr(&output);
            assert_eq!(output.status.code(), Some(code), "{kind} {args:?}: {reported}");
            assert!(
                reported.contains(said) && reported.len() < 4096,
                "{kind} {args:?}: {reported}"
            );
        }
        // The same file, given to a command.
        for args in [["config", "check"], ["config", "plan"]] {
            let mut command = tessera();
            command.env("TESSERA_STATE_DIR", dir.path()).args(args).arg(&file);
            let output = ended(&command).await;
            let reported = stderr(&output) + &String::from_utf8_lossy(&output.stdout);
            assert_eq!(output.status.code(), Some(64), "{kind} {args:?}: {reported}");
            assert!(reported.contains(said), "{kind} {args:?}: {reported}");
        }
        unmake(&file);
    }
    // Standard input may be without end.
    let script = format!("ulimit -v {MEMORY}; exec \"$0\" config check - < /dev/zero");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(artefacts().tessera());
    let output = ended(&command).await;
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    assert!(stderr(&output).contains("larger than"), "{}", stderr(&output));
}

/// All other files that a start reads, each in turn something else.
#[tokio::test]
async fn a_start_survives_what_lies_beside_the_ledger() {
    let mut node = Simulated::serving().await;
    for name in ["ledger.redb.config.toml", "ledger.redb.config.new"] {
        for (kind, _) in HOSTILE {
            assert_eq!(node.terminate().await, Some(0), "{name} {kind}");
            let at = node.dir.path().join(name);
            if at.symlink_metadata().is_ok() {
                unmake(&at);
            }
            let _kept = make(kind, &at);
            node.serve().await;
            bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
            if at.symlink_metadata().is_ok() {
                unmake(&at);
            }
        }
    }
    assert_eq!(node.terminate().await, Some(0));
}

/// A file system whose server answers nothing: what stat, open and read wait for does not come.
struct Silent {
    at: PathBuf,
    _server: std::fs::File,
}

impl Silent {
    /// `None` where none can be mounted.
    fn mount(at: &Path) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let server = std::fs::File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let none = MsFlags::empty();
        mount(Some("silent"), at, Some("fuse"), none, Some(options.as_str())).ok()?;
        Some(Silent { at: at.to_owned(), _server: server })
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn a_file_system_that_does_not_answer_holds_up_neither_commands_nor_the_end() {
    let mut node = Simulated::new("replicas = 4").await;
    let Some(silent) = Silent::mount(&node.dir.path().join("silent")) else {
        eprintln!("not run: file systems cannot be mounted here");
        return;
    };
    node.serve().await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    let file = node.file();
    let lost = silent.at.join("config.toml");
    for args in [&["config", "check"][..], &["status"], &["serve"]] {
        let mut command = tessera();
        command.env("TESSERA_STATE_DIR", node.dir.path()).arg("-c").arg(&lost).args(args);
        let output = ended(&command).await;
        assert!(stderr(&output).contains("does not answer"), "{args:?}: {}", stderr(&output));
    }
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    symlink(&lost, &file).unwrap();
    // More often than the plugin has threads for what blocks.
    for _ in 0..12 {
        signal(&node, Signal::SIGHUP);
        let mut reload = tessera();
        let other = node.dir.path().join("other.toml");
        std::fs::write(&other, &text).unwrap();
        let output = ended(reload.arg("-c").arg(other).args(["config", "reload"])).await;
        assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    }
    // It serves on, and takes a good file again.
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, text.replace("replicas = 4", "replicas = 8")).unwrap();
    bounded(node.kubelet.wait_allocatable(GPU, 16)).await;
    std::fs::remove_file(&file).unwrap();
    symlink(&lost, &file).unwrap();
    signal(&node, Signal::SIGHUP);
    // What it reads may never come, and is nothing that it began.
    assert_eq!(node.terminate().await, Some(0));
}

/// A worker that never comes back, here one that looks at the shim's directory, is no reason to outlive
/// kubelet's patience.
#[tokio::test]
async fn sigterm_ends_a_plugin_whose_start_is_stuck() {
    let mut node = Simulated::new("replicas = 4").await;
    let Some(silent) = Silent::mount(&node.dir.path().join("silent")) else {
        eprintln!("not run: file systems cannot be mounted here");
        return;
    };
    let file = node.file();
    let text = std::fs::read_to_string(&file).unwrap();
    for key in ["shim", "ledger", "pages", "admin"] {
        let own = format!("\n{key} = \"{}/", node.dir.path().display());
        assert!(text.contains(&own), "{text}");
        let stuck = format!("\n{key} = \"{}/", silent.at.display());
        std::fs::write(&file, text.replace(&own, &stuck)).unwrap();
        // What an earlier start wrote is no news of this one.
        std::fs::write(node.dir.path().join("log"), "").unwrap();
        node.launch();
        let plugin = node.plugin.as_ref().unwrap().id();
        until(|| waits_for_a_file_system(plugin).then_some(())).await;
        let status = node.terminate().await;
        let log = std::fs::read_to_string(node.dir.path().join("log")).unwrap();
        assert_eq!(status, Some(1), "{key}: {log}");
        assert!(log.contains("something that was begun does not end"), "{key}: {log}");
    }
}

/// Whether a thread of this process waits for the server of a FUSE file system.
fn waits_for_a_file_system(process: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    // A thread may have ended since.
    let call = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("wchan"));
    tasks.filter_map(|task| call(task).ok()).any(|call| call.contains("fuse"))
}

/// Threads that block, as many as `tessera serve` has.
const THREADS: usize = 8;

/// A driver that hangs, and admin clients that ask about it: the threads that kubelet's calls need are not all taken.
#[test]
fn status_of_a_driver_that_hangs_leaves_threads_for_allocate() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(THREADS)
        .build()
        .unwrap();
    runtime.block_on(async {
        let node = TestNode::start().await;
        let gpus = Arc::clone(&node.gpus);
        gpus.hangs.store(true, Ordering::Relaxed);
        let mut calls = tokio::task::JoinSet::new();
        for n in 0..40 {
            let admin = admin(node.dir.path());
            calls.spawn(async move {
                // Some give up, which frees no thread.
                let patience = Duration::from_millis(if n % 2 == 0 { 50 } else { 3_600_000 });
                let _ = tokio::time::timeout(patience, admin.get::<Status>(STATUS)).await;
                let _ = admin.get::<Value>("/api/v1/explain?subject=a").await;
            });
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        for n in 0..4 {
            bounded(node.allocate(&[replica(0, n)])).await.unwrap();
        }
        let admin = admin(node.dir.path());
        bounded(admin.get::<Value>(LIVE)).await.unwrap();
        gpus.hangs.store(false, Ordering::Relaxed);
        bounded(async { while calls.join_next().await.is_some() {} }).await;
        bounded(admin.get::<Status>(STATUS)).await.unwrap();
    });
}

// Whatever lies at a configured path, a pipe, a device, a socket, far too large a file: the plugin starts, or says
// which path it is, in bounded time and memory. By every key of the configuration that is a path.

const KINDS: [&str; 7] = ["fifo", "zero", "directory", "socket", "sparse", "missing", "unreadable"];

/// Most bytes of memory that the plugin may ever have had.
const MOST: u64 = 256 << 20;

/// Keys that are paths, with what they belong to. What a mount of containers names the plugin does not open.
fn paths() -> Vec<String> {
    let rows = keys::rows();
    let is_path = |accepts: &str| accepts.starts_with("absolute path");
    let paths = rows.iter().filter(|row| is_path(&row.accepts) && !row.key.contains('['));
    paths.map(|row| row.key.clone()).collect()
}

/// The configuration with another value of a key.
fn with(text: &str, key: &str, value: &str) -> String {
    let (section, name) = key.rsplit_once('.').unwrap();
    let (header, line) = (format!("[{section}]"), format!("{name} = {value}"));
    let mut lines: Vec<&str> = text.lines().collect();
    let Some(at) = lines.iter().position(|line| *line == header) else {
        return format!("{text}\n{header}\n{line}\n");
    };
    let end = lines.iter().skip(at + 1).position(|line| line.starts_with('['));
    let end = end.map_or(lines.len(), |more| at + 1 + more);
    let begin = format!("{name} = ");
    let old = (at + 1..end).find(|index| lines[*index].starts_with(&begin));
    match old {
        Some(index) => lines[index] = &line,
        None => lines.insert(at + 1, &line),
    }
    lines.join("\n")
}

/// Starts the plugin with such a thing at this key's path, and gives what is wrong with what becomes of it.
async fn try_out(key: String, kind: &'static str) -> Result<(), String> {
    let is_tls = key.starts_with("api.tls");
    let mut node = Simulated::new("replicas = 2").await;
    let odd = node.dir.path().join("odd");
    let _kept = make(kind, &odd);
    let config = node.file();
    let mut text = std::fs::read_to_string(&config).unwrap();
    if is_tls {
        let made = tessera_web::self_signed(&["localhost"]).unwrap();
        let files = [("api.tls_cert", made.certificate.pem()), ("api.tls_key", made.key_pem())];
        for (key, pem) in files {
            let path = node.dir.path().join(key);
            std::fs::write(&path, pem).unwrap();
            text = with(&text, key, &format!("{path:?}"));
        }
        text = with(&text, "api.listen", "\"127.0.0.1:0\"");
    }
    std::fs::write(&config, with(&text, &key, &format!("{odd:?}"))).unwrap();
    node.launch();
    let pid = node.plugin.as_ref().unwrap().id();
    let named = odd.display().to_string();
    let mut memory = 0;
    let ended = until(|| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
        memory = memory.max(peak.unwrap_or(0) << 10);
        if node.plugin.as_mut().unwrap().try_wait().unwrap().is_some() {
            return Some(true);
        }
        let output = node.run(&["status", "-o", "json"]);
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let said = [&json["warnings"], &json["plugin"]];
        let is_said = said.iter().any(|said| said.to_string().contains(&named));
        let is_live = json["plugin"]["registration"] == "live";
        (is_said || is_live && !is_tls).then_some(false)
    })
    .await;
    let log = std::fs::read_to_string(node.dir.path().join("log")).unwrap_or_default();
    match (ended, memory) {
        (_, MOST..) => Err(format!("{key} {kind}: {} MiB", memory >> 20)),
        (true, _) if !log.contains(&named) => {
            Err(format!("{key} {kind}: it ended without a word: {log}"))
        }
        _ => Ok(()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_path_of_the_configuration_holds_the_plugin_up_or_takes_its_memory() {
    let paths = paths();
    assert!(paths.len() > 15 && paths.iter().any(|key| key == "api.tls_cert"), "{paths:?}");
    let mut faults = Vec::new();
    for key in paths {
        let mut tries = tokio::task::JoinSet::new();
        for kind in KINDS {
            tries.spawn(try_out(key.clone(), kind));
        }
        while let Some(tried) = tries.join_next().await {
            faults.extend(
                tried.map_err(|error| format!("{key}: {error}")).and_then(|tried| tried).err(),
            );
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
