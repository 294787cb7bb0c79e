//! Kubeconfigs with a mistake: each is an error of the kubeconfig that names the file and the field, and nothing is
//! asked. A server that is away is no such error.

use std::time::Duration;

use tessera_cluster::user::UserClient;
use tessera_cluster::{Access, ApiError};
use tessera_model::printable;

use super::World;

const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

/// A kubeconfig of these fields in a directory with files that its fields may name.
async fn asked(world: &World, context: &str, cluster: &str, user: &str) -> Result<(), ApiError> {
    let dir = world.dir.path();
    let file = dir.join("broken");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: s, cluster: {{{cluster}}}}}]\n\
         users: [{{name: u, user: {{{user}}}}}]\ncontexts: [{{name: c, context: {{{context}}}}}]\n"
    );
    std::fs::write(&file, text).unwrap();
    let user = UserClient::new(Access::Kubeconfig(vec![file]), Duration::from_secs(3), 4);
    user.pods("team", "").await.map(drop)
}

#[tokio::test]
async fn every_broken_kubeconfig_is_one_and_names_its_file_and_field() {
    let world = World::new();
    let dir = world.dir.path();
    std::fs::write(dir.join("empty.pem"), "").unwrap();
    std::fs::write(dir.join("junk.pem"), CERTIFICATE).unwrap();
    std::fs::write(dir.join("lines"), "two\nwords\n").unwrap();
    nix::unistd::mkfifo(&dir.join("pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let server = {
        let access = world.server.access();
        format!("server: 'http://{}:{}'", access.host, access.port)
    };
    let is_sound = asked(&world, "cluster: s, user: u", &server, "token: secret").await;
    is_sound.unwrap();
    let before = world.server.asked().len();
    let of_context = [
        ("cluster: k, user: u", "names the cluster \"k\""),
        ("user: u", "missing field `cluster`"),
        ("cluster: '', user: u", "names the cluster \"\""),
        ("cluster: s, user: v", "names the user \"v\""),
    ];
    let exec = "apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never";
    let words = dir.join("words.json").display().to_string();
    let credential = r#"{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "two\nwords"}}"#;
    std::fs::write(&words, credential).unwrap();
    let of_cluster = [
        ("", "server"),
        ("server: ''", "server"),
        ("server: 'a b'", "server"),
        ("server: 'ftp://k'", "server"),
        ("server: 'https://'", "server"),
        ("server: 'https://k', certificate-authority: absent", "certificate-authority"),
        ("server: 'https://k', certificate-authority: .", "certificate-authority"),
        ("server: 'https://k', certificate-authority: pipe", "certificate-authority"),
        ("server: 'https://k', certificate-authority: empty.pem", "certificate-authority"),
        ("server: 'https://k', certificate-authority: junk.pem", "certificate-authority"),
        ("server: 'https://k', certificate-authority: lines", "certificate-authority"),
        ("server: 'https://k', certificate-authority-data: '!'", "certificate-authority-data"),
        ("server: 'https://k', certificate-authority-data: bm8=", "certificate-authority"),
        ("server: 'https://k', certificate-authority-data: ''", "certificate-authority"),
        ("server: 'https://k', proxy-url: 'a b'", "proxy-url"),
        ("server: 'https://k', tls-server-name: 'a b'", "tls-server-name"),
    ];
    let of_user = [
        ("tokenFile: absent", "tokenFile"),
        ("tokenFile: .", "tokenFile"),
        ("tokenFile: pipe", "tokenFile"),
        ("tokenFile: lines", "tokenFile"),
        ("token: \"two\\nwords\"", "token"),
        ("client-certificate: absent, client-key: absent", "client-certificate"),
        ("client-certificate: junk.pem, client-key: pipe", "client-key"),
        ("client-certificate-data: '!', client-key-data: '!'", "client-certificate"),
        ("client-certificate-data: bm8=, client-key-data: bm8=", "client-certificate"),
        ("client-certificate-data: bm8=", "client-certificate"),
        ("client-key-data: bm8=", "client-certificate"),
        ("auth-provider: {name: azure, config: {}}", "auth-provider"),
        ("token: secret, as: \"two\\nwords\"", "as"),
        (&format!("exec: {{{exec}, command: /nowhere/login}}"), "exec.command"),
        (&format!("exec: {{{exec}, command: tessera-no-such-login}}"), "exec.command"),
        (&format!("exec: {{{exec}}}"), "exec"),
        (&format!("exec: {{{exec}, command: echo}}"), "exec"),
        (&format!("exec: {{{exec}, command: cat, args: ['{words}']}}"), "one word"),
    ];
    let contexts =
        of_context.map(|(context, says)| (context, server.as_str(), "token: secret", says));
    let context = "cluster: s, user: u";
    let clusters = of_cluster.map(|(cluster, says)| (context, cluster, "token: secret", says));
    let users = of_user.map(|(user, says)| (context, server.as_str(), user, says));
    let mut missed = Vec::new();
    for (context, cluster, user, says) in contexts.into_iter().chain(clusters).chain(users) {
        let case = format!("{context} / {cluster} / {user}");
        let file = format!("{}: ", dir.join("broken").display());
        match asked(&world, context, cluster, user).await {
            Err(ApiError::Kubeconfig { reason, .. })
                if reason.starts_with(&file)
                    && reason.contains(says)
                    && !reason.contains("secret")
                    && !reason.contains('\n') => {}
            other => missed.push(format!("{case}: {other:?}")),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    assert_eq!(world.server.asked().len(), before);
    let hint = format!(
        "exec: {{{exec}, command: tessera-no-such-login, installHint: get it at k.example}}"
    );
    let error = asked(&world, context, &server, &hint).await.unwrap_err().to_string();
    assert!(error.contains("install it: get it at k.example"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_away_and_a_login_that_fails_are_no_mistakes_of_the_kubeconfig() {
    let world = World::new();
    let context = "cluster: s, user: u";
    let away = asked(&world, context, "server: 'http://127.0.0.1:1'", "token: secret").await;
    assert!(matches!(away, Err(ApiError::Unreachable { .. })), "{away:?}");
    let failing = "exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: 'false'}";
    let failed = asked(&world, context, "server: 'http://127.0.0.1:1'", failing).await;
    let Err(ApiError::Login { command, reason, .. }) = &failed else { panic!("{failed:?}") };
    assert!(reason.contains("/broken: user \"u\"") && reason.contains("to see why"), "{reason}");
    assert_eq!(command, "false");
    let dir = world.dir.path();
    let access = world.server.access();
    let server = format!("server: 'http://{}:{}'", access.host, access.port);
    let file = format!("tokenFile: '{}'", dir.join("token").display());
    asked(&world, context, &server, &file).await.unwrap();
}

#[tokio::test]
async fn a_login_that_fails_or_leaves_something_running_is_said_in_one_line_and_not_waited_for() {
    let world = World::new();
    let access = world.server.access();
    let server = format!("server: 'http://{}:{}'", access.host, access.port);
    let login = |script: &str| {
        let exec =
            "apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: sh";
        format!("exec: {{{exec}, args: ['-c', '{script}']}}")
    };
    let context = "cluster: s, user: u";
    let says = r#"{"kind": "ExecCredential", "status": {"token": "secret"}}"#;
    std::fs::write(world.dir.path().join("credential"), says).unwrap();
    let credential = format!("cat {}", world.dir.path().join("credential").display());
    asked(&world, context, &server, &login(&format!("sleep 4000 & {credential}"))).await.unwrap();
    for script in ["printf \"\\033[2Jgone\\rall\" >&2; exit 1", "printf \"\\033[2Jgone\\rall\""] {
        let error = asked(&world, context, &server, &login(script)).await.unwrap_err().to_string();
        assert_eq!(printable::line(&error), error, "{error}");
        assert!(error.contains("/broken: user \"u\""), "{error}");
    }
}
