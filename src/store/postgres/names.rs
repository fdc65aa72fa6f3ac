//! The names of the tables: checked once, quoted everywhere.

use crate::error::{StoreError, StoreErrorKind};

/// Where the records lie.
#[derive(Clone, Debug)]
pub(super) struct Names {
    schema: Option<String>,
    table: String,
}

impl Names {
    /// # Errors
    ///
    /// `Other` if a name is not made of letters, digits and underscores, begins with a digit, or is
    /// too long.
    pub(super) fn new(schema: Option<&str>, table: &str) -> Result<Self, StoreError> {
        check("table", table, LONGEST_TABLE)?;
        if let Some(schema) = schema {
            check("schema", schema, LONGEST_NAME)?;
        }
        Ok(Self {
            schema: schema.map(str::to_owned),
            table: table.to_owned(),
        })
    }

    pub(super) fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// The table of records, ready to stand in a statement.
    pub(super) fn table(&self) -> String {
        self.qualified("")
    }

    /// The table that says which migrations were applied.
    pub(super) fn versions(&self) -> String {
        self.qualified(VERSIONS)
    }

    /// The text of a migration with these names in it.
    pub(super) fn applied_to(&self, migration: &str) -> String {
        // Every other piece between quotes is an identifier; a migration has no quotes elsewhere.
        let pieces = migration.split('"').enumerate();
        pieces
            .map(|(n, piece)| match piece.strip_prefix(DEFAULT_TABLE) {
                Some(suffix) if n % 2 == 1 => self.in_place_of(suffix),
                _ if n % 2 == 1 => quoted(piece),
                _ => piece.to_owned(),
            })
            .collect()
    }

    /// Tables carry their schema. Names of indexes and constraints may not: they follow their table.
    fn in_place_of(&self, suffix: &str) -> String {
        match suffix {
            "" | VERSIONS => self.qualified(suffix),
            _ => quoted(&format!("{}{suffix}", self.table)),
        }
    }

    fn qualified(&self, suffix: &str) -> String {
        let table = quoted(&format!("{}{suffix}", self.table));
        match &self.schema {
            Some(schema) => format!("{}.{table}", quoted(schema)),
            None => table,
        }
    }
}

impl Default for Names {
    fn default() -> Self {
        Self {
            schema: None,
            table: DEFAULT_TABLE.to_owned(),
        }
    }
}

/// An identifier in its quotes. Checked names hold none, so nothing has to be doubled.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{name}\"")
}

fn check(what: &str, name: &str, longest: usize) -> Result<(), StoreError> {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let begins_well = name
        .bytes()
        .next()
        .is_some_and(|byte| !byte.is_ascii_digit());
    if begins_well && name.bytes().all(word) && name.len() <= longest {
        return Ok(());
    }
    Err(StoreError::new(
        StoreErrorKind::Other,
        format!(
            "the {what} name has to be 1 to {longest} ASCII letters, digits and underscores, and \
             may not begin with a digit"
        ),
    ))
}

/// The table's name where none was set, and in the published migrations.
pub(super) const DEFAULT_TABLE: &str = "idempotency_keys";
const VERSIONS: &str = "_schema";
/// What PostgreSQL keeps of an identifier; the rest of a longer one would be cut off silently.
const LONGEST_NAME: usize = 63;
/// Leaves room for the longest suffix.
const LONGEST_TABLE: usize = LONGEST_NAME - "_schema_pkey".len();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_end_a_quote_or_be_cut_off_are_refused() {
        let long = "x".repeat(LONGEST_TABLE + 1);
        for bad in [
            "", "1a", "a b", "a\"b", "a.b", "a;b", "é", "a\0", "a-b", &long,
        ] {
            assert!(Names::new(None, bad).is_err(), "{bad:?}");
            if bad != long {
                assert!(Names::new(Some(bad), "a").is_err(), "{bad:?}");
            }
        }
        assert!(Names::new(Some("Payments_2"), &long[1..]).is_ok());
    }

    #[test]
    fn a_migration_takes_the_names_that_were_set() {
        let names = Names::new(Some("app"), "Keys").unwrap();
        let text = "ON \"idempotency_keys\" \"idempotency_keys_x\" \"idempotency_keys_schema\" \
                    \"idempotency_keys_schema_pkey\"";
        assert_eq!(
            names.applied_to(text),
            "ON \"app\".\"Keys\" \"Keys_x\" \"app\".\"Keys_schema\" \"Keys_schema_pkey\""
        );
    }

    #[test]
    fn a_name_that_begins_like_the_published_one_is_left_whole() {
        let names = Names::new(None, "idempotency_keys_2").unwrap();
        assert_eq!(
            names.applied_to("\"idempotency_keys\" \"idempotency_keys_x\""),
            "\"idempotency_keys_2\" \"idempotency_keys_2_x\""
        );
    }

    #[test]
    fn without_names_of_its_own_a_migration_stays_as_it_is() {
        let names = Names::new(None, DEFAULT_TABLE).unwrap();
        let text = "\"idempotency_keys\" \"idempotency_keys_x\" \"idempotency_keys_schema\"";
        assert_eq!(names.applied_to(text), text);
    }
}
