//! The moves that compare and set, as scripts that the server runs in one step.

use std::sync::LazyLock;

use redis::{Cmd, Script};

/// A script, by the names of the files that it is joined from.
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
        let (verb, script) = match by {
            By::Hash => ("EVALSHA", &self.hash),
            By::Text => ("EVAL", &self.text),
        };
        let of_keys: usize = keys.iter().map(|key| key.len()).sum();
        let of_arguments: usize = arguments.iter().map(|argument| argument.len()).sum();
        let bytes = verb.len() + script.len() + 1 + of_keys + of_arguments;
        let mut command = Cmd::with_capacity(3 + keys.len() + arguments.len(), bytes);
        command.arg(verb).arg(script);
        command.arg(keys.len()).arg(keys).arg(arguments);
        command
    }
}

macro_rules! moves {
    ($($name:ident = $($file:literal)+;)*) => {$(
        pub(super) static $name: LazyLock<Move> = LazyLock::new(|| {
            let text = concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+);
            let text = text.to_owned();
            let hash = Script::new(&text).get_hash().to_owned();
            Move { text, hash }
        });
    )*};
}

moves! {
    CLAIM = "record" "claim";
    COMPLETE = "complete";
    RELEASE = "record" "release";
    LEASE = "record" "lease";
    NOTE = "record" "note";
    PURGE = "record" "receipt" "purge";
    SETTLE = "record" "receipt" "settle";
    LOOK = "record" "look";
}
