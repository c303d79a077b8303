//! Converts an RDB file for a server of another family or an older version.
//!
//! ```text
//! cargo run -p remora-redis --example convert -- dump.rdb valkey 9.1 converted.rdb
//! ```

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};

use remora_redis::rdb::{Converter, Format, Options};

/// Bytes of one read.
const PIECE_BYTES: usize = 64 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [from, family, version, to] = &args[..] else {
        return Err("arguments: FILE redis|valkey MAJOR.MINOR FILE".into());
    };
    let (major, minor) = version.split_once('.').ok_or("a version is MAJOR.MINOR")?;
    let format = Format::of_server(family == "valkey", (major.parse()?, minor.parse()?));
    let (mut input, mut output) = (File::open(from)?, File::create(to)?);
    let mut converter = Converter::new(format, Options::default());
    let (mut piece, mut converted) = (vec![0; PIECE_BYTES], Vec::new());
    while !converter.is_over() {
        let length = input.read(&mut piece)?;
        if length == 0 {
            return Err("the file is cut off".into());
        }
        converter.convert(piece.get(..length).unwrap_or_default(), &mut converted)?;
        output.write_all(&converted)?;
        converted.clear();
    }
    println!("{:?}", converter.done());
    Ok(())
}
