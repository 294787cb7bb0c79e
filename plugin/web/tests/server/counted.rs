//! What metrics say of the API: each answer over TCP is counted once, by its code, and each question to the API server
//! by how it was answered.

use std::collections::BTreeMap;

use tessera_cluster::fixtures::Temper;
use tessera_web::Tls;
use tessera_web::client::{Client, Endpoint};

use crate::world::{World, short};

/// The world's counters, as metrics have them.
#[derive(Debug, PartialEq)]
struct Counted {
    requests: BTreeMap<u16, u64>,
    reviews: BTreeMap<(&'static str, &'static str), u64>,
}

impl Counted {
    fn of(world: &World) -> Self {
        let reviews = world.counts.reviews().into_iter();
        Counted {
            requests: world.counts.requests().into_iter().collect(),
            reviews: reviews.map(|(review, outcome, count)| ((review, outcome), count)).collect(),
        }
    }

    /// What was added since.
    fn since(&self, before: &Counted) -> Counted {
        Counted {
            requests: grown(&self.requests, &before.requests),
            reviews: grown(&self.reviews, &before.reviews),
        }
    }
}

fn grown<K: Ord + Copy>(now: &BTreeMap<K, u64>, before: &BTreeMap<K, u64>) -> BTreeMap<K, u64> {
    let more = |(key, count): (&K, &u64)| (*key, count - before.get(key).copied().unwrap_or(0));
    now.iter().map(more).filter(|(_, more)| *more > 0).collect()
}

#[tokio::test]
async fn each_answer_is_counted_by_its_code_and_each_review_by_its_outcome() {
    let world = World::new(short(), Tls::Plain).await;
    assert_eq!(world.counts.listening(), Some(true));
    assert_eq!(world.counts.reviews().len(), 6, "each is there from the start");
    let path = "/api/v1/gpus";
    let unreachable = Temper::Answers(500, "etcd is away".into());
    // Token, what the API server does, path; code of the answer, and how each kind of question ended.
    let cases = [
        (Some("token-all"), Temper::Works, path, 200, [Some("ok"), Some("ok")]),
        (Some("token-1"), Temper::Works, "/api/v1/history?since=nonsense", 400, [Some("ok"), None]),
        (None, Temper::Works, path, 401, [None, None]),
        (Some("token-of-nobody"), Temper::Works, path, 401, [Some("refused"), None]),
        (Some("token-0"), Temper::Works, path, 403, [Some("ok"), Some("refused")]),
        (Some("token-all"), Temper::Works, "/api/v1/nothing", 404, [None, None]),
        (Some("token-all"), unreachable, path, 503, [Some("unreachable"), None]),
    ];
    for (token, temper, path, code, outcomes) in cases {
        // What was asked before is forgotten.
        tokio::time::sleep(short().token * 3).await;
        world.cluster.set_temper(temper);
        let before = Counted::of(&world);
        let client = Client::new(Endpoint::Plain(world.address));
        let client = token.map_or(client.clone(), |token| client.with_token(token));
        let answer = client.ask(path, "application/json").await.unwrap();
        let what = format!("{path} of {token:?}");
        assert_eq!(answer.status().as_u16(), code, "{what}");
        let counted = Counted::of(&world).since(&before);
        assert_eq!(counted.requests, BTreeMap::from([(code, 1)]), "{what}");
        for (review, outcome) in ["token", "access"].into_iter().zip(outcomes) {
            let kinds: Vec<_> = counted
                .reviews
                .keys()
                .filter(|(kind, _)| *kind == review)
                .map(|(_, o)| *o)
                .collect();
            assert_eq!(kinds, Vec::from_iter(outcome), "{review} of {what}");
        }
    }
    // What is given up counts as nothing: any client may hang up at any time.
    tokio::time::sleep(short().token * 3).await;
    world.cluster.set_temper(Temper::Silent);
    let before = Counted::of(&world).reviews;
    let client = world.client("token-all");
    let asking = client.ask(path, "application/json");
    assert!(tokio::time::timeout(short().token, asking).await.is_err());
    tokio::time::sleep(short().limit).await;
    assert_eq!(Counted::of(&world).reviews, before);
}
