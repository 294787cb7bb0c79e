//! Lists in parts: one that goes on for ever, one whose state is forgotten, and what is no list.

use std::time::{Duration, Instant};

use tessera_cluster::fixtures::{Paging, Temper};
use tessera_cluster::user::UserClient;
use tessera_cluster::{Access, ApiError};

use super::World;

fn user(world: &World, limit: Duration) -> UserClient {
    let file = world.dir.path().join("user");
    std::fs::write(&file, world.server.kubeconfig()).unwrap();
    UserClient::new(Access::Kubeconfig(vec![file]), limit, 4)
}

#[tokio::test]
async fn a_list_as_a_whole_has_a_limit_of_time_however_quick_its_parts_are() {
    let world = World::new();
    world.server.set_paging(Paging::Endless(Duration::from_millis(50)));
    let begun = Instant::now();
    let error = user(&world, Duration::from_millis(500)).pods("", "").await.unwrap_err();
    let ApiError::Endless { parts, objects, .. } = &error else { panic!("{error}") };
    assert!(*parts > 1 && *objects == *parts, "{error}");
    assert!(error.to_string().contains("did not end within 3s"), "{error}");
    // 400 parts would take 20 s.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_list_whose_state_is_forgotten_begins_anew_once() {
    let world = World::new();
    let user = user(&world, Duration::from_secs(3));
    world.server.set_paging(Paging::Forgets(1));
    let names: Vec<String> =
        user.pods("", "").await.unwrap().into_iter().map(|pod| pod.metadata.name).collect();
    assert_eq!(names, ["p0", "p1", "p2"]);
    world.server.set_paging(Paging::Forgets(2));
    let error = user.pods("", "").await.unwrap_err();
    assert!(matches!(error, ApiError::Expired { .. }), "{error}");
    assert!(error.to_string().contains("ask again"), "{error}");
    // What goes on from no earlier part is not asked again.
    world.server.set_temper(Temper::Answers(410, "too old".into()));
    let before = world.count("GET /api/v1/pods");
    user.pods("", "").await.unwrap_err();
    assert_eq!(world.count("GET /api/v1/pods"), before + 1);
}
