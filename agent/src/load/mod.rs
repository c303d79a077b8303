//! `remora load`: fills a server with test data, as fast as one connection allows.
//!
//! ```text
//!   Content ──bytes of key i──▶ Writer ──commands, flushed per half megabyte──▶ server
//!   seed, i                        ▲ └── owed replies, read when there are too many ──┘
//! ```
//!
//! The content of a key depends on the seed and the key's number only. So two runs, or two servers, get the same data
//! with any pipeline depth. No value is ever complete in memory: it is generated piece by piece in the buffer that is
//! sent.

mod content;
mod keys;
mod writer;

use self::{content::Content, keys::Keys, writer::Writer};
use crate::{
    args::LoadArgs,
    exit::{Code, Failure},
    patience::{Patience, RETRY_FOR},
    progress::{self, Meter, Unit},
    server::{Client, Facts, Server, Task},
    units::{Size, readable},
};

/// Runs `remora load`.
pub async fn run(args: LoadArgs) -> Result<(), Failure> {
    let server = args.server.open(Task::Load)?;
    let mut patience = Patience::new(args.retry_for, RETRY_FOR);
    let client = patience.keep_trying(async || ready(&server, args.db).await).await?;
    let bytes = args.keys.saturating_mul(args.value_size.get());
    let meter = Meter::start("load", Unit::Bytes, Some(bytes));
    let mut writer = Writer::new(client, args.pipeline);
    let keys = Keys::new(&args);
    for number in 0..args.keys {
        keys.write(number, &mut writer, &meter).await?;
    }
    writer.finish().await?;
    let (seconds, elapsed) = (meter.elapsed().as_secs_f64().max(f64::EPSILON), meter.elapsed());
    meter.finish();
    progress::print_line(&format!(
        "{} keys, {} in {}: {:.0} keys/s, {}/s",
        args.keys,
        Size::bytes(bytes),
        readable(elapsed),
        args.keys as f64 / seconds,
        Size::bytes((bytes as f64 / seconds) as u64),
    ))
}

/// A connection to the server, which has loaded and accepts commands.
async fn ready(server: &Server, database: Option<u32>) -> Result<Client, Failure> {
    let mut client = server.connect().await?;
    // A user without the right to ask is not told of the state, and finds it out by the first write.
    match Facts::read(&mut client).await {
        Ok(facts) if facts.loading == Some(true) => {
            let text = format!("the server {} is loading its data set (-LOADING)", server.url());
            return Err(Failure::passing(Code::Server, text));
        }
        Err(error) if error.is_passing() => return Err(error.into()),
        _ => {}
    }
    if let Some(database) = database {
        client.select(database).await?;
    }
    Ok(client)
}
