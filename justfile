# Short names for plain commands; nothing here is needed.

# Every test.
test *arguments:
    scripts/test {{arguments}}

# What has to hold before a change lands.
ci:
    .ci/run

lint:
    cargo fmt --check
    cargo clippy --all-targets --all-features -- -D warnings

doc:
    cargo doc --no-deps --all-features --open

bench:
    cargo bench --bench layer
    cargo bench --bench store --features sqlite,postgres,redis,testing

# This crate beside others.
peers *arguments:
    cd benches/peers && cargo run --release --locked --ignore-rust-version -- {{arguments}}
