//! The labels of a node, and their watch.

use std::time::Duration;

use tessera_cluster::fixtures::Temper;
use tessera_cluster::node::NodeLabels;
use tessera_cluster::{ApiError, Kind, Verb};
use tokio::time::timeout;

use super::{World, until};

const LABEL: &str = "tessera.dev/config";

fn labels(world: &World, watch: Duration) -> NodeLabels {
    NodeLabels::new(world.server.access(), "n1", Duration::from_secs(3), watch)
}

#[tokio::test]
async fn a_change_of_the_labels_is_heard_and_read() {
    let world = World::new();
    let own = labels(&world, Duration::from_secs(60));
    let bare = own.get().await.unwrap();
    assert_eq!(bare.labels.get(LABEL), None);
    let watching = tokio::spawn({
        let (own, bare) = (own.clone(), bare.clone());
        async move { own.changed(&bare).await }
    });
    until(|| world.server.with(|store| store.open_watches()) == 1).await;
    world.server.with(|store| store.label("n2", LABEL, Some("other")));
    assert!(!watching.is_finished(), "another node's label");
    world.server.with(|store| store.label("n1", LABEL, Some("l4")));
    timeout(Duration::from_secs(60), watching).await.unwrap().unwrap().unwrap();
    let labelled = own.get().await.unwrap();
    assert_eq!(labelled.labels[LABEL], "l4");
    // What changed between reading and watching is heard, too.
    timeout(Duration::from_secs(60), own.changed(&bare)).await.unwrap().unwrap();
    let asked = world.server.asked();
    let watched = asked.iter().find(|asked| asked.target.contains("watch=true")).unwrap();
    assert!(watched.target.contains("fieldSelector=metadata.name%3Dn1"), "{watched:?}");
    assert!(watched.headers["accept"].contains("PartialObjectMetadata"), "{watched:?}");
}

#[tokio::test]
async fn forgotten_changes_are_read_again_and_what_is_forbidden_is_named() {
    let world = World::new();
    let own = labels(&world, Duration::from_secs(60));
    let old = own.get().await.unwrap();
    world.server.with(|store| store.label("n1", LABEL, Some("l4")));
    world.server.forget_changes();
    own.changed(&old).await.unwrap();
    world.server.forbid("WATCH", "nodes", true);
    let forbidden = own.changed(&old).await.unwrap_err();
    assert!(
        matches!(&forbidden, ApiError::Forbidden { call, .. } if (call.verb, call.kind) == (Verb::Watch, Kind::Nodes))
    );
    world.server.set_temper(Temper::Answers(500, "etcd".into()));
    assert!(matches!(own.get().await, Err(ApiError::Busy { status: 500, .. })));
}
