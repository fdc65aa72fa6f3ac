//! The moves that compare and set, as scripts that the server runs in one step.

use std::sync::LazyLock;

use redis::{Cmd, Script};

/// A script by the name of its file.
pub(super) struct Move {
    text: String,
    hash: String,
}

/// How a script is named to the server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// By its hash: the server has it, unless it was restarted or flushed.
    Hash,
    /// In full, which makes the server keep it.
    Text,
}

impl Move {
    /// The command that runs it.
    pub(super) fn on(&self, by: By, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        let mut command = redis::cmd(match by {
            By::Hash => "EVALSHA",
            By::Text => "EVAL",
        });
        command.arg(match by {
            By::Hash => &self.hash,
            By::Text => &self.text,
        });
        command.arg(keys.len()).arg(keys).arg(arguments);
        command
    }
}

macro_rules! moves {
    ($($name:ident = $file:literal;)*) => {$(
        pub(super) static $name: LazyLock<Move> = LazyLock::new(|| {
            let text = concat!(
                include_str!("scripts/record.lua"),
                include_str!(concat!("scripts/", $file, ".lua")),
            );
            let text = text.to_owned();
            let hash = Script::new(&text).get_hash().to_owned();
            Move { text, hash }
        });
    )*};
}

moves! {
    CLAIM = "claim";
    COMPLETE = "complete";
    RELEASE = "release";
    LEASE = "lease";
    NOTE = "note";
    PURGE = "purge";
    SETTLE = "settle";
    LOOK = "look";
}
