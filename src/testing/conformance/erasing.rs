//! Rule 16: how a scope is forgotten.

use super::*;

/// Rule 16: live claims and kept outcomes too; afterwards the keys were never seen.
pub async fn erase_forgets_a_scope_in_every_state<H: Harness>(harness: &H) {
    let case = Case::new(harness, "erase_forgets_a_scope_in_every_state");
    let scope = case.scope("customer");
    let key = |name: &str| ScopedKey::join("conformance", &scope, name);
    let names = ["live", "abandoned", "completed", "released", "large"];
    let mut claims = Vec::new();
    for name in names {
        claims.push(case.acquire(&case.request_for(key(name))).await);
    }
    let [live, abandoned, completed, released, large] = &claims[..] else {
        case.broken("five keys were claimed");
    };
    case.age(abandoned.key(), 2 * HOUR).await;
    let outcome = response(201, b"first");
    let completion = case.complete(completed, &outcome, None).await;
    case.equal(completion, Completion::Recorded, "completing");
    case.applied(case.checkpoint(live, "paid", b"personal").await, "noting");
    case.applied(case.release(released).await, "releasing");
    let completion = case
        .complete(large, &response(200, &[7; 20_000]), None)
        .await;
    case.equal(completion, Completion::Recorded, "completing");

    let erased = case.erase_all("", &scope).await;
    case.equal(erased, names.len(), "the erased records");
    for name in names {
        let left = case.lookup(&key(name)).await;
        case.equal(left, None, "the erased record");
    }
    let late = case.complete(live, &outcome, None).await;
    case.equal(
        late,
        Completion::ClaimLost,
        "the completion of a live claim",
    );
    for name in names {
        let claim = case.acquire(&case.request_for(key(name))).await;
        case.equal(claim.attempt(), 1, "the attempt after an erasure");
    }
}

/// Rules 13 and 16: a scope is no pattern, and no other scope loses anything.
pub async fn erase_takes_one_scope_only<H: Harness>(harness: &H) {
    let case = Case::new(harness, "erase_takes_one_scope_only");
    let endings = [
        "", "*", "?", "%", "_", "a", "ab", "a*", "A", "\\", "\0", "\0a", "é",
    ];
    let key = |ending: &str| ScopedKey::join("conformance", &case.scope(ending), "key");
    for ending in endings {
        let _ = case.acquire(&case.request_for(key(ending))).await;
    }
    let nobody = case.scope("b");
    case.equal(case.erase_all("", &nobody).await, 0, "what nobody had");
    for (n, ending) in endings.iter().enumerate() {
        let erased = case.erase_all("", &case.scope(ending)).await;
        case.equal(erased, 1, "the erased records");
        case.equal(case.lookup(&key(ending)).await, None, "the erased record");
        for left in &endings[n + 1..] {
            case.record(&key(left)).await;
        }
    }
}

/// Rule 16: in every namespace that begins with the given text, and in no other.
pub async fn erase_keeps_to_the_namespaces_it_is_given<H: Harness>(harness: &H) {
    let case = Case::new(harness, "erase_keeps_to_the_namespaces_it_is_given");
    let scope = case.scope("customer");
    let namespaces = [
        "shop/http",
        "shop/",
        "shop/web%",
        "shop\\",
        "shopping",
        "",
        "a-shop/",
    ];
    let key = |namespace: &str| ScopedKey::join(namespace, &scope, "key");
    for namespace in namespaces {
        let _ = case.acquire(&case.request_for(key(namespace))).await;
    }
    let erased = case.erase_all("shop/", &scope).await;
    case.equal(erased, 3, "the erased records");
    for (n, namespace) in namespaces.iter().enumerate() {
        let left = case.lookup(&key(namespace)).await;
        case.equal(left.is_some(), n >= 3, "whether a record is left");
    }
    case.equal(case.erase_all("%", &scope).await, 0, "what a pattern met");
    let erased = case.erase_all("", &scope).await;
    case.equal(erased, 4, "the erased records of all namespaces");
}

/// Rule 16: in steps, and none is left when it says so.
pub async fn erase_removes_no_more_than_its_limit<H: Harness>(harness: &H) {
    let case = Case::new(harness, "erase_removes_no_more_than_its_limit");
    let scope = case.scope("customer");
    let names = ["1", "2", "3", "4", "5"];
    for name in names {
        let key = ScopedKey::join("conformance", &scope, name);
        let _ = case.acquire(&case.request_for(key)).await;
        let _ = case.started(name).await;
    }
    case.equal(
        case.erase("", &scope, 0).await,
        0,
        "what a limit of zero erased",
    );
    let left = async || {
        let mut left = 0;
        for name in names {
            let key = ScopedKey::join("conformance", &scope, name);
            left += usize::from(case.lookup(&key).await.is_some());
        }
        left
    };
    let mut before = left().await;
    case.equal(before, 5, "the records before the erasure");
    loop {
        let erased = case.erase("", &scope, 2).await;
        let after = left().await;
        case.equal(before - after, erased, "what is gone after an erasure");
        before = after;
        if erased == 0 {
            break;
        }
    }
    case.equal(before, 0, "what was left when it said that none is");
    for name in names {
        case.record(&case.key(name)).await;
    }
}
