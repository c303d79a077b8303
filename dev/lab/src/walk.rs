//! Walk: all keys of a server's databases, in batches.

// Stands alone: the comparison, its digest and the contents of a server all walk by it.

use std::collections::BTreeMap;

use remora_redis::resp::Frame;

use crate::client::Client;
use crate::error::{Error, Result};

/// Keys per SCAN.
const SCAN_COUNT: &str = "1000";

/// The databases that hold keys, and how many keys of each expire.
pub(crate) fn databases(client: &mut Client) -> Result<BTreeMap<u32, u64>> {
    let keyspace = client.info("keyspace")?;
    let expires = |line: &str| line.split(',').find_map(|part| part.strip_prefix("expires=")?.parse().ok());
    let numbered = |name: &str| name.strip_prefix("db")?.parse().ok();
    Ok(keyspace.iter().filter_map(|(name, line)| Some((numbered(name)?, expires(line)?))).collect())
}

/// Walks all keys of a database that SCAN's further options want, until `look` says that it has seen enough.
pub(crate) fn each_batch(
    client: &mut Client,
    database: u32,
    wanted: &[&str],
    mut look: impl FnMut(&mut Client, &[Vec<u8>]) -> Result<bool>,
) -> Result<()> {
    client.ok(&["SELECT", &database.to_string()])?;
    let mut cursor = "0".to_owned();
    loop {
        let scan = [&["SCAN", &cursor, "COUNT", SCAN_COUNT], wanted].concat();
        let mut answer = client.list(&scan)?.into_iter();
        let (Some(next), Some(Frame::Array(keys))) = (answer.next(), answer.next()) else {
            return Err(Error::Garbled("SCAN's answer is not a cursor and a list".into()));
        };
        let keys: Vec<Vec<u8>> = keys.into_iter().filter_map(|key| key.into_bytes().ok()).collect();
        cursor = next.as_str().unwrap_or("0").to_owned();
        if !look(client, &keys)? || cursor == "0" {
            return Ok(());
        }
    }
}

/// Sends the same command for each key, in one pipeline.
pub(crate) fn ask_each(client: &mut Client, database: u32, question: &[&str], keys: &[Vec<u8>]) -> Result<Vec<Frame>> {
    client.ok(&["SELECT", &database.to_string()])?;
    let ask = |key: &Vec<u8>| question.iter().map(|word| word.as_bytes().to_vec()).chain([key.clone()]).collect();
    client.pipeline(&keys.iter().map(ask).collect::<Vec<Vec<Vec<u8>>>>())
}
