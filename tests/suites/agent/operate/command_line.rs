//! The `tessera` program from outside: exit statuses, messages, and the plugin on simulated GPUs.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tessera_harness::plugin::{GPU, Simulated, stderr, tessera, until};

#[test]
fn a_wrong_configuration_exits_64_with_every_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "[share]\nreplicas = 0\nmemroy = \"4Gi\"\n[log]\nformat = 3\n").unwrap();
    for command in [&["serve"][..], &["prepare-host"], &["config", "check"]] {
        let output = tessera().arg("--config").arg(&file).args(command).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{command:?}");
        let file = file.display();
        let want = format!(
            "{file}:2: share.replicas: must be from 1 to 256\n\
             {file}:3: share.memroy: unknown key; did you mean `memory`?\n\
             {file}:5: log.format: must be a string, not integer\n"
        );
        assert_eq!(stderr(&output), want);
    }
    // A client of the plugin finds it as well as can be, and says so.
    let output = tessera().arg("--config").arg(&file).arg("status").output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    assert!(stderr(&output).contains("config.toml:2: share.replicas: must"), "{}", stderr(&output));
}

#[test]
fn a_wrong_command_line_exits_64_and_help_does_not() {
    assert_eq!(tessera().arg("sevre").output().unwrap().status.code(), Some(64));
    assert_eq!(tessera().output().unwrap().status.code(), Some(64));
    assert_eq!(tessera().arg("--help").output().unwrap().status.code(), Some(0));
    assert_eq!(tessera().arg("--version").output().unwrap().status.code(), Some(0));
}

/// With a configuration that another user wrote, anybody may listen where the plugin is said to.
#[test]
fn a_plugin_of_another_user_is_not_asked() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("not checked, for only root can be another user");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (file, admin) = (dir.path().join("config.toml"), dir.path().join("admin.sock"));
    std::fs::write(&file, format!("[paths]\nadmin = {admin:?}\n")).unwrap();
    std::os::unix::fs::chown(dir.path(), Some(65534), None).unwrap();
    let listen = "import socket, time\ns = socket.socket(socket.AF_UNIX)\n\
                  s.bind('admin.sock'); s.listen()\n\
                  open('ready', 'w')\ntime.sleep(100)";
    let mut other = std::process::Command::new("python3");
    let other = other.args(["-c", listen]).current_dir(dir.path()).uid(65534).gid(65534);
    let mut other = other.spawn().unwrap();
    while !dir.path().join("ready").exists() {
        assert_eq!(other.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    let asked = [&["status"][..], &["history", "a"]].map(|words| {
        let output = tessera().arg("-c").arg(&file).args(words).output().unwrap();
        (output.status.code(), said(&output))
    });
    other.kill().unwrap();
    other.wait().unwrap();
    for (code, said) in asked {
        assert_eq!(code, Some(69), "{said}");
        assert!(said.contains("the other end is uid 65534's"), "{said}");
    }
}

/// As under `| head`, once it has what it wants.
#[test]
fn a_reader_that_has_gone_changes_no_exit_status() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, format!("[paths]\nstate = {0:?}\nadmin = {0:?}\n", dir.path())).unwrap();
    let commands: [&[&str]; 13] = [
        &["status"],
        &["status", "-o", "json"],
        &["top", "--once"],
        &["top", "--once", "-o", "json"],
        &["explain", "a"],
        &["history", "a"],
        &["recommend", "--all"],
        &["waste"],
        &["config", "default"],
        &["config", "reference"],
        &["config", "check"],
        &["completions", "bash"],
        &["sandbox", "list"],
    ];
    for command in commands {
        let run =
            |out: Stdio| tessera().arg("-c").arg(&file).args(command).stdout(out).output().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (read, unread) = (run(Stdio::null()), run(writer.into()));
        assert_eq!((unread.status, stderr(&unread)), (read.status, stderr(&read)), "{command:?}");
    }
}

#[tokio::test]
async fn impossible_quotas_are_reported_by_check_and_end_serve_with_64() {
    let node = Simulated::new("replicas = 4\nmemory = \"70Gi\"").await;
    for command in [&["config", "check"][..], &["serve"]] {
        let output = node.run(command);
        assert_eq!(output.status.code(), Some(64));
        let text = stderr(&output);
        let reported =
            text.lines().filter(|l| l.contains("config.toml:3: share.memory: 4 replicas"));
        let reported: Vec<&str> = reported.collect();
        assert_eq!(reported.len(), 1, "both GPUs are alike, and one line says it: {text}");
        assert!(reported[0].contains("each of GPUs 0, 1 ("), "{text}");
    }
}

#[tokio::test]
async fn config_check_shows_what_each_gpu_would_be_sold_as() {
    let node = Simulated::new(
        "replicas = 4\n[[layout]]\ngpus = [\"1\"]\nshares = [\n\
         { resource = \"x.dev/large\", memory = \"50%\", cores = \"50%\" },\n\
         { resource = \"x.dev/small\", count = 2, memory = \"25%\", compute = \"strict\" },\n]\n\
         [[layout]]\ngpus = [\"NVIDIA Nonesuch\"]\nshares = [{ resource = \"x.dev/none\" }]",
    )
    .await;
    let file = node.file();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("[gpus]\n", "[gpus]\nexclude = [\"GPU-gone\"]\n")).unwrap();
    let output = node.run(&["config", "check"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let notes = stderr(&output);
    assert!(notes.contains("note: gpus.exclude names GPU-gone"), "{notes}");
    assert!(notes.contains("config.toml:10: layout[1].gpus: names none of this node"), "{notes}");
    let table = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    assert_eq!(
        rows[0],
        ["GPU", "NAME", "UUID", "RESOURCE", "REPLICAS", "MEMORY", "CORES"],
        "{table}"
    );
    assert_eq!((rows[1][0], &rows[1][3..5], rows[1][6]), ("0", &[GPU, "4"][..], "25% burst"));
    assert_eq!(
        (rows[2][0], &rows[2][3..5], rows[2][6]),
        ("1", &["x.dev/large", "1"][..], "50% burst")
    );
    assert_eq!((&rows[3][..2], rows[3][3]), (&["x.dev/small", "2"][..], "25% strict"));
    assert_eq!(rows[4], ["ok"], "{table}");
}

/// What bash gets for the last of these words.
fn completed(node: &Simulated, words: &[&str]) -> (Vec<String>, Output) {
    let config = node.file();
    let mut command = node.on_machine(std::process::Command::new(&node.program));
    command.env("TESSERA_COMPLETE", "bash").env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_INDEX", (words.len() + 2).to_string());
    command.args(["--", "tessera", "-c"]).arg(&config).args(words);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    (text.lines().map(str::to_owned).collect(), output)
}

#[tokio::test]
async fn pods_allocations_and_gpus_are_completed_from_the_plugin_and_nothing_without_one() {
    let mut node = Simulated::serving().await;
    node.start_pod("llm", 1).await;
    node.named("llm").await;
    let status = node.json();
    let id = status["allocations"][0]["id"].as_str().unwrap();
    let uuid = status["gpus"][1]["uuid"].as_str().unwrap();
    for (words, wanted) in [
        (&["explain", "def"][..], "default/llm"),
        (&["explain", &id[..4]], id),
        (&["explain", &uuid[..5]], uuid),
        (&["quota", "show", "default/"], "default/llm"),
        (&["quota", "set", "default/llm", "--container", "m"], "main"),
        (&["cordon", "1"], "1"),
        (&["uncordon", &uuid[..5]], uuid),
    ] {
        let (names, output) = completed(&node, words);
        assert!(
            names.iter().any(|name| name == wanted),
            "{words:?}: {names:?}, {}",
            stderr(&output)
        );
    }
    let (names, _) = completed(&node, &["cordon", "def"]);
    assert!(!names.iter().any(|name| name.contains("llm")), "a pod is no GPU: {names:?}");

    node.terminate().await;
    let (names, output) = completed(&node, &["explain", "def"]);
    assert!(output.status.success());
    assert_eq!((names, stderr(&output)), (Vec::new(), String::new()));
}

#[tokio::test]
async fn json_of_every_command_has_the_version() {
    let node = Simulated::serving().await;
    node.start_pod("a", 1).await;
    node.named("a").await;
    let plan = node.file().display().to_string();
    for args in [
        &["status", "-o", "json"][..],
        &["top", "--once", "--interval", "100ms", "-o", "json"],
        &["explain", "a", "-o", "json"],
        &["quota", "show", "-o", "json"],
        &["quota", "show", "a", "-o", "json"],
        &["quota", "set", "a", "--cores", "20", "-o", "json"],
        &["quota", "reset", "a", "-o", "json"],
        &["cordon", "0", "-o", "json"],
        &["uncordon", "0", "-o", "json"],
        &["config", "plan", &plan, "-o", "json"],
        &["config", "reload", "-o", "json"],
    ] {
        let answer = node.run(args);
        assert_eq!(answer.status.code(), Some(0), "{args:?}: {}", stderr(&answer));
        let json: Value = serde_json::from_slice(&answer.stdout).unwrap();
        assert_eq!(json["api_version"], "tessera.dev/v1", "{args:?}: {json}");
    }
    let unknown = node.run(&["quota", "show", "nobody"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("there is default/a"), "{}", stderr(&unknown));
}

// Commands that ask the plugin, where it cannot be asked: each reason has a sentence with what to do and an exit
// status.

/// Every command that asks the plugin.
const ASKING: &[&[&str]] = &[
    &["status"],
    &["status", "--ready"],
    &["status", "--live"],
    &["top", "--once"],
    &["explain", "some-pod"],
    &["quota", "show"],
    &["quota", "set", "some-pod", "--memory", "1Gi"],
    &["quota", "reset", "some-pod"],
    &["cordon", "0"],
    &["uncordon", "--all"],
    &["config", "reload"],
    &["history"],
    &["recommend"],
    &["waste"],
    &["trace", "-o", "-"],
];

/// All that it wrote, without the ends of lines that the width made.
fn said(output: &Output) -> String {
    let all = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(output);
    all.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn file(dir: &std::path::Path) -> std::path::PathBuf {
    let at = |name: &str| dir.join(name).display().to_string();
    let file = dir.join("config.toml");
    let text = format!(
        "[paths]\nadmin = \"{}\"\nledger = \"{}\"\npages = \"{}\"\n",
        at("run/admin.sock"),
        at("ledger.redb"),
        at("pages")
    );
    std::fs::write(&file, text).unwrap();
    std::fs::create_dir_all(dir.join("run")).unwrap();
    file
}

#[test]
fn each_command_says_why_the_plugin_is_not_reached_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let file = file(dir.path());
    let each = |part: &str| {
        for args in ASKING {
            let output = tessera().arg("-c").arg(&file).args(*args).output().unwrap();
            let text = said(&output);
            assert_eq!(output.status.code(), Some(69), "{args:?}: {text}");
            // Some begin a sentence with it.
            assert!(
                text.to_lowercase().contains(part) && text.contains("kubectl"),
                "{args:?}: {text}"
            );
            for wrong in ["os error", "pid 0", "nothing is called"] {
                assert!(!text.contains(wrong), "{wrong}: {args:?}: {text}");
            }
        }
    };
    each("so it is not running");
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("run/admin.sock")).unwrap());
    each("nobody listens at");
}

#[test]
fn a_user_that_may_not_ask_is_refused_with_77() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("not run: only root can become somebody who may not");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = file(dir.path());
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(dir.path(), 0o755);
    open(&dir.path().join("run"), 0o700);
    // The program lies where another user may not go.
    let program = dir.path().join("tessera");
    tessera_harness::copy(&tessera_harness::artefacts().tessera(), &program);
    for args in ASKING {
        let mut command = std::process::Command::new(&program);
        std::os::unix::process::CommandExt::uid(&mut command, 1000);
        let output = command.arg("-c").arg(&file).args(*args).output().unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(77), "{args:?}: {text}");
        let reported = text.contains("permission denied: only root may ask")
            || text.contains("Permission denied: only root may ask");
        assert!(reported && text.contains("uid 1000") && text.contains("sudo"), "{args:?}: {text}");
    }
}

#[tokio::test]
async fn a_node_whose_gpus_are_all_left_out_says_so_with_those_that_there_are() {
    let mut node = Simulated::on("", "include = [\"GPU-nowhere\"]").await;
    let check = node.run(&["config", "check"]);
    let reported = said(&check);
    assert_eq!(check.status.code(), Some(1), "{reported}");
    assert!(
        reported.contains("warning: nothing would be sold here") && reported.contains("GPU 0 ("),
        "{reported}"
    );
    assert!(!reported.ends_with(" ok"), "{reported}");
    node.launch();
    let output = until(|| {
        let output = node.run(&["status"]);
        let text = said(&output);
        let leaves_none = text.contains("gpus.include and gpus.exclude leave none");
        (text.contains("No GPUs") && leaves_none).then_some(output)
    })
    .await;
    assert_eq!(output.status.code(), Some(69), "{}", said(&output));
}

#[test]
fn a_file_that_is_not_there_is_named_and_no_other() {
    for args in [&["config", "check", "/nope.toml"][..], &["-c", "/nope.toml", "config", "check"]] {
        let output = tessera().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(64));
        let want = "/nope.toml: there is no such file; `tessera config default` prints one to begin with\n";
        assert_eq!(stderr(&output), want);
    }
}
