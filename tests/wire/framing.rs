//! How a body is cut into pieces on its way is no part of what it says.

use crate::h1::{chunked, head, with_length};
use crate::h2;
use crate::message::{Answer, Request};
use crate::puppet::{Puppet, Wire, ran};

const BODY: &str = "from=alice&amount=19";

/// Sends bytes as they are over HTTP/1.1.
async fn raw(puppet: &Puppet, request: &Request, bytes: &[u8]) -> Answer {
    let mut connection = puppet.h1().await;
    connection.write(bytes).await;
    connection.answer(request).await
}

#[tokio::test]
async fn a_body_is_the_same_however_it_is_framed_and_wherever_it_is_split() {
    let puppet = Puppet::start(&[]);
    let request = Request::post("split").key("k").body(BODY);
    let changed = request.clone().body(BODY.replace("19", "18"));
    let first = puppet.send(Wire::H1, &request).await;
    first.fresh(200);

    for at in 0..=BODY.len() {
        for extension in ["", ";a", " ; a = b", ";a=\"b c\";d"] {
            for trailers in ["", "x-checksum: 17\r\n"] {
                let framed = |request: &Request| {
                    let (one, two) = request.body.split_at(at);
                    chunked(request, &[one, two], extension, trailers)
                };
                let again = raw(&puppet, &request, &framed(&request)).await;
                again.is_replay_of(&first, &[]);
                let other = raw(&puppet, &changed, &framed(&changed)).await;
                other.problem(422, "key_reused");
            }
        }
        let mut h2 = puppet.h2().await;
        let again = h2.send_split(&request, at).await.expect("an answer");
        again.is_replay_of(&first, &[]);
        let other = h2.send_split(&changed, at).await.expect("an answer");
        other.problem(422, "key_reused");
    }
    let bytes: Vec<&[u8]> = request.body.chunks(1).collect();
    let bytewise = chunked(&request, &bytes, "", "");
    let again = raw(&puppet, &request, &bytewise).await;
    again.is_replay_of(&first, &[]);
    assert_eq!(puppet.count("split").await, ran(1));
}

#[tokio::test]
async fn whichever_framing_comes_first_the_others_are_its_retries() {
    let puppet = Puppet::start(&[]);
    let framings: [fn(&Request) -> Vec<u8>; 3] = [
        with_length,
        |request| chunked(request, &[&request.body], "", ""),
        |request| {
            chunked(
                request,
                &[&request.body[..7], &request.body[7..]],
                ";x=1",
                "",
            )
        },
    ];
    for (number, framing) in framings.iter().enumerate() {
        let name = format!("first-{number}");
        let request = Request::post(&name).key(&name).body(BODY);
        let first = raw(&puppet, &request, &framing(&request)).await;
        first.fresh(200);
        for framing in framings {
            let again = raw(&puppet, &request, &framing(&request)).await;
            again.is_replay_of(&first, &[]);
        }
        puppet
            .send(Wire::H2, &request)
            .await
            .is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
    let request = Request::post("h2-first").key("h2-first").body(BODY);
    let first = puppet.h2().await.send_split(&request, 5).await;
    let first = first.expect("an answer");
    for framing in framings {
        let again = raw(&puppet, &request, &framing(&request)).await;
        again.is_replay_of(&first, &[]);
    }
    assert_eq!(puppet.count("h2-first").await, ran(1));
}

#[tokio::test]
async fn no_body_is_an_empty_body_in_every_framing() {
    let puppet = Puppet::start(&[]);
    let request = Request::post("empty").key("empty").body("");
    let first = raw(&puppet, &request, &head(&request, "")).await;
    first.fresh(200);
    let length = raw(&puppet, &request, &with_length(&request)).await;
    length.is_replay_of(&first, &[]);
    let chunks = raw(&puppet, &request, &chunked(&request, &[], "", "")).await;
    chunks.is_replay_of(&first, &[]);
    let (answer, mut body) = puppet.h2().await.open(&request).await;
    body.send_data(Default::default(), true).expect("open");
    let data = h2::read(answer).await.expect("an answer");
    data.is_replay_of(&first, &[]);
    assert_eq!(puppet.count("empty").await, ran(1));
}
