//! A data set of small values of all types, as many services have: half strings, a third hashes, the rest lists, sets
//! and sorted sets; a tenth of the keys expire.

use crate::client::Client;
use crate::error::Result;
use crate::random::Random;

/// Commands that are sent before their answers are read.
const TOGETHER: u64 = 500;

/// A time at which no benchmark runs any more: 2100-01-01, in milliseconds since 1970.
const FAR_MS: u64 = 4_102_444_800_000;

/// Bytes of a value of the mix, on average, with its names.
pub const MIX_BYTES: u64 = 200;

/// Fills the database that is selected with this many keys. The same seed gives the same data.
pub fn fill_mix(client: &mut Client, keys: u64, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut commands = Vec::new();
    for number in 0..keys {
        let name = format!("mix:{number}").into_bytes();
        let command = match number % 6 {
            0..3 => {
                let length = random.between(10, 500) as usize;
                vec![b"SET".to_vec(), name.clone(), random.bytes(length)]
            }
            3 | 4 => hash(name.clone(), &mut random),
            _ => collection(name.clone(), number / 6, &mut random),
        };
        commands.push(command);
        if random.one_in(10) {
            commands.push(vec![b"PEXPIREAT".to_vec(), name, (FAR_MS + number).to_string().into_bytes()]);
        }
        if number % TOGETHER == TOGETHER - 1 || number + 1 == keys {
            client.pipeline(&commands)?;
            commands.clear();
        }
    }
    Ok(())
}

/// A record of a few fields: text, and numbers.
fn hash(name: Vec<u8>, random: &mut Random) -> Vec<Vec<u8>> {
    let mut command = vec![b"HSET".to_vec(), name];
    for field in 0..random.between(2, 8) {
        command.push(format!("field{field}").into_bytes());
        command.push(match field % 3 {
            0 => random.below(1 << 31).to_string().into_bytes(),
            _ => {
                let length = random.between(4, 40) as usize;
                random.bytes(length)
            }
        });
    }
    command
}

/// A list, a set of words, a set of numbers, or a sorted set.
fn collection(name: Vec<u8>, which: u64, random: &mut Random) -> Vec<Vec<u8>> {
    let word = ["RPUSH", "SADD", "SADD", "ZADD"][which as usize % 4];
    let mut command = vec![word.into(), name];
    for element in 0..random.between(2, 12) {
        if word == "ZADD" {
            command.push(random.below(100_000).to_string().into_bytes());
        }
        command.push(match which % 4 {
            2 => random.below(1 << 20).to_string().into_bytes(),
            _ => format!("{element}:{:016x}", random.word()).into_bytes(),
        });
    }
    command
}
