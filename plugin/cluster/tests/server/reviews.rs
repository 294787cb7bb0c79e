//! Users of tokens and their rights.

use std::time::Duration;

use tessera_cluster::fixtures::{ApiServer, Temper};
use tessera_cluster::reviews::ReviewClient;
use tessera_cluster::{ApiError, Client, Verb};

fn world() -> (ApiServer, ReviewClient, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::start(dir.path());
    let client = ReviewClient::new(Client::new(server.access(), Duration::from_secs(3)));
    (server, client, dir)
}

#[tokio::test]
async fn rights_are_of_a_user_or_a_group_in_one_namespace_or_all() {
    let (server, client, _dir) = world();
    server.with(|store| {
        store.users.accept("a", "ann", &["dev"]);
        store.users.allow("dev", "team");
        store.users.accept("o", "ops", &[]);
        store.users.allow("ops", "");
    });
    let ann = client.user("a").await.unwrap().unwrap();
    let ops = client.user("o").await.unwrap().unwrap();
    for (user, namespace, may) in [
        (&ann, "team", true),
        (&ann, "other", false),
        (&ann, "", false),
        (&ops, "other", true),
        (&ops, "", true),
    ] {
        assert_eq!(
            client.may(user, Verb::Get, namespace).await.unwrap(),
            may,
            "{} {namespace}",
            user.name
        );
    }
    assert!(!client.may(&ann, Verb::Delete, "team").await.unwrap());
    // What an authenticator said goes with each question: webhooks judge by it.
    let asked =
        server.asked().into_iter().rfind(|asked| asked.target.contains("subjectaccessreviews"));
    let spec = &asked.unwrap().body["spec"];
    assert_eq!((&spec["user"], &spec["uid"]), (&"ann".into(), &"uid-of-ann".into()));
    assert!(spec["extra"].get("authentication.kubernetes.io/credential-id").is_some());
}

#[tokio::test]
async fn a_server_that_is_away_silent_or_forbids_is_an_error_without_the_token() {
    let (server, client, _dir) = world();
    server.forbid("POST", "tokenreviews", true);
    let error = client.user("s3cret").await.unwrap_err();
    assert!(matches!(error, ApiError::Forbidden { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("{apiGroups: [\"authentication.k8s.io\"], resources: [\"tokenreviews\"], verbs: [\"create\"]}"));
    assert!(!text.contains("s3cret"), "{text}");
    server.forbid("POST", "tokenreviews", false);
    for temper in
        [Temper::Silent, Temper::Answers(500, "no".into()), Temper::Answers(200, "no".into())]
    {
        server.set_temper(temper);
        let error = client.user("s3cret").await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
    }
    drop(server);
    assert!(matches!(client.user("s3cret").await.unwrap_err(), ApiError::Unreachable { .. }));
}
