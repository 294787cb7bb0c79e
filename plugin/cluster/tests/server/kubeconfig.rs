//! Kubeconfigs with a mistake: each is an error of the kubeconfig that names the file, and nothing is asked. A server
//! that is away is no such error.

use std::time::Duration;

use tessera_cluster::user::UserClient;
use tessera_cluster::{Access, ApiError};
use tessera_model::printable;

use super::World;

fn server(world: &World) -> String {
    let access = world.server.access();
    format!("server: 'http://{}:{}'", access.host, access.port)
}

/// A kubeconfig of these fields in a directory with files that its fields may name.
async fn asked(world: &World, context: &str, cluster: &str, user: &str) -> Result<(), ApiError> {
    let dir = world.dir.path();
    let file = dir.join("broken");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: s, cluster: {{{cluster}}}}}]\n\
         users: [{{name: u, user: {{{user}}}}}]\ncontexts: [{{name: c, context: {{{context}}}}}]\n"
    );
    std::fs::write(&file, text).unwrap();
    let user = UserClient::new(Access::Kubeconfig(vec![file], None), Duration::from_secs(3), 4);
    user.pods("team", "").await.map(drop)
}

#[tokio::test]
async fn every_broken_kubeconfig_is_one_and_names_its_file() {
    let world = World::new();
    let dir = world.dir.path();
    std::fs::write(dir.join("lines"), "two\nwords\n").unwrap();
    let (used, token, server) = ("cluster: s, user: u", "token: secret", server(&world));
    asked(&world, used, &server, token).await.unwrap();
    let before = world.server.asked().len();
    let exec = "apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never";
    let plugin = |more: &str| format!("exec: {{{exec}, {more}}}");
    let hint = plugin("command: tessera-no-such-login, installHint: get it at k.example");
    let mut missed = Vec::new();
    for (context, cluster, user, says) in [
        ("cluster: k, user: u", server.as_str(), token, "k"),
        ("user: u", &server, token, "missing field `cluster`"),
        ("cluster: s, user: v", &server, token, "names the user \"v\""),
        (used, "", token, "url"),
        (used, "server: 'a b'", token, "url"),
        (used, "server: 'ftp://k'", token, "write https://HOST:PORT"),
        (used, "server: 'https://k', certificate-authority: absent", token, "absent"),
        (used, "server: 'https://k', certificate-authority-data: '!'", token, "base64"),
        (used, "server: 'https://k', proxy-url: 'a b'", token, "proxy"),
        (used, &server, "tokenFile: absent", "absent"),
        (used, &server, "tokenFile: lines", "one word"),
        (used, &server, "token: \"two\\nwords\"", "one word"),
        (used, &server, "client-certificate: absent, client-key: absent", "absent"),
        (used, &server, "auth-provider: {name: azure, config: {}}", "azure"),
        (used, &server, "token: secret, as: \"two\\nwords\"", "header"),
        (used, &server, &plugin("command: /nowhere/login"), "or correct the path"),
        (used, &server, &hint, "install it: get it at k.example"),
        (used, &server, &format!("exec: {{{exec}}}"), "command"),
        (used, &server, &plugin("command: echo"), "prints no ExecCredential"),
    ] {
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
    assert!(reason.contains("to see why"), "{reason}");
    assert_eq!(command, "false");
    let dir = world.dir.path();
    let server = server(&world);
    // As `kubectl create token` writes it.
    std::fs::write(dir.join("token"), "secret\n").unwrap();
    let file = format!("tokenFile: '{}'", dir.join("token").display());
    asked(&world, context, &server, &file).await.unwrap();
}

#[tokio::test]
async fn a_login_that_fails_or_leaves_something_running_is_said_in_one_line_and_not_waited_for() {
    let world = World::new();
    let server = server(&world);
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
        assert!(error.contains("\"sh\""), "{error}");
    }
}
