//! A sample of the primary's keys: how many bytes they take in memory and in a snapshot.
//!
//! `INFO` tells what the data take in memory, where strings stand in blocks of the allocator's sizes. A snapshot has
//! their bytes alone, and compresses some. `DUMP` answers with the bytes that the snapshot will have.

use std::time::{Duration, Instant};

use remora_redis::resp::Frame;

use crate::server::{Client, Facts, ServerError};

/// What some keys take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) keys: u64,
    /// Bytes of memory.
    pub(super) in_memory: u64,
    /// Bytes of a snapshot.
    pub(super) in_snapshot: u64,
}

/// Keys of a sample.
const KEYS: u64 = 256;

/// The longest time for a sample.
const TIME: Duration = Duration::from_secs(2);

/// Larger values are not dumped, as the primary does nothing else meanwhile. Of a string the length is asked; others
/// take about as many bytes in a snapshot as in memory.
const DUMPED: u64 = 256 << 10;

/// What `DUMP` adds: the version of the format, and a checksum.
const DUMP_FOOTER: u64 = 10;

/// What a snapshot adds to a key: its length.
const KEY_LENGTH: u64 = 2;

impl Sample {
    /// Takes some keys of the database that has the most; `None` if our user may not, or there are none.
    ///
    /// # Errors
    /// The connection failed.
    pub(super) async fn take(client: &mut Client, facts: &Facts) -> Result<Option<Sample>, ServerError> {
        match Sample::taken(client, facts).await {
            Err(error) if error.refusal().is_some() => Ok(None),
            sample => sample.map(|sample| Some(sample).filter(|sample| sample.keys > 0)),
        }
    }

    async fn taken(client: &mut Client, facts: &Facts) -> Result<Sample, ServerError> {
        let (mut sample, began) = (Sample::default(), Instant::now());
        let fullest = facts.databases.iter().max_by_key(|database| database.keys);
        if let Some(database) = fullest.filter(|database| database.number != 0) {
            client.command(&["SELECT", &database.number.to_string()]).await?;
        }
        for _ in 0..KEYS {
            let Frame::Bulk(key) = client.command(&["RANDOMKEY"]).await? else { break };
            let usage = client.command(&[b"MEMORY".as_slice(), b"USAGE", &key]).await?;
            // A key that has just expired is not there.
            let Frame::Integer(used) = usage else { continue };
            let used = u64::try_from(used).unwrap_or(0);
            let dumped = match used > DUMPED {
                true => match client.command(&[b"STRLEN".as_slice(), &key]).await {
                    Ok(Frame::Integer(length)) => u64::try_from(length).unwrap_or(used),
                    Ok(_) => used,
                    Err(error) if error.refusal().is_some() => used,
                    Err(error) => return Err(error),
                },
                false => match client.command(&[b"DUMP".as_slice(), &key]).await? {
                    Frame::Bulk(value) => {
                        (value.len() as u64).saturating_sub(DUMP_FOOTER) + key.len() as u64 + KEY_LENGTH
                    }
                    _ => continue,
                },
            };
            sample.keys += 1;
            sample.in_memory = sample.in_memory.saturating_add(used);
            sample.in_snapshot = sample.in_snapshot.saturating_add(dumped);
            if began.elapsed() >= TIME {
                break;
            }
        }
        Ok(sample)
    }

    /// Bytes of the snapshot of this number of keys. `data`: the bytes that all of them take in memory. What the sample
    /// does not explain, such as a few large values, counts as many bytes as it takes in memory.
    pub(super) fn snapshot_of(&self, keys: u64, data: u64) -> u64 {
        let of_all = |bytes: u64| {
            u64::try_from(u128::from(bytes) * u128::from(keys) / u128::from(self.keys.max(1))).unwrap_or(u64::MAX)
        };
        of_all(self.in_snapshot).saturating_add(data.saturating_sub(of_all(self.in_memory)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_sample_does_not_explain_is_taken_as_it_is() {
        let sample = Sample { keys: 2, in_memory: 2600, in_snapshot: 2100 };
        assert_eq!(sample.snapshot_of(1000, 1_300_000), 1_050_000);
        assert_eq!(sample.snapshot_of(1000, 1_250_000), 1_050_000, "INFO does not count all that MEMORY USAGE does");
        assert_eq!(sample.snapshot_of(1000, 9_300_000), 9_050_000);
        assert_eq!(Sample::default().snapshot_of(u64::MAX, 7), 7);
    }
}
