//! A simulated device: what was not synced is lost sector by sector when the power fails, syncs fail, and space ends.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use remora_lab::Random;

use super::files::{Files, Name};

const SECTOR: usize = 512;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Simulated(Mutex<Device>);

#[derive(Clone, Debug)]
pub(super) struct Device {
    random: Random,
    bodies: Vec<Body>,
    /// What processes see, and what is durable: the body of each name.
    names: BTreeMap<Name, usize>,
    durable: BTreeMap<Name, usize>,
    pub(super) fails_sync: bool,
    pub(super) is_full: bool,
    /// Operations until the power fails.
    pub(super) left: Option<u64>,
}

/// A file, whatever its name.
#[derive(Clone, Debug, Default)]
struct Body {
    /// What processes see.
    seen: Vec<u8>,
    durable: Vec<u8>,
    /// What was written to each sector since the last sync.
    pending: BTreeMap<usize, Vec<[u8; SECTOR]>>,
}

impl Body {
    fn note(&mut self, from: usize, to: usize) {
        for sector in from / SECTOR..to.div_ceil(SECTOR) {
            let mut bytes = [0; SECTOR];
            let seen = self.seen.get(sector * SECTOR..).unwrap_or_default();
            let has = seen.len().min(SECTOR);
            bytes[..has].copy_from_slice(&seen[..has]);
            self.pending.entry(sector).or_default().push(bytes);
        }
    }

    /// Some of what is pending becomes durable.
    fn settle(&mut self, random: &mut Random) {
        self.durable.resize(self.seen.len(), 0);
        for (sector, versions) in std::mem::take(&mut self.pending) {
            let chosen = random.below(versions.len() as u64 + 1) as usize;
            let at = sector * SECTOR;
            if let (Some(version), Some(into)) = (versions.get(chosen), self.durable.get_mut(at..at + SECTOR)) {
                into.copy_from_slice(version);
            }
        }
    }
}

impl Simulated {
    pub(super) fn new(seed: u64) -> Simulated {
        Simulated(Mutex::new(Device {
            random: Random::new(seed),
            bodies: Vec::new(),
            names: BTreeMap::new(),
            durable: BTreeMap::new(),
            fails_sync: false,
            is_full: false,
            left: None,
        }))
    }

    /// Another device with the same content.
    pub(super) fn copy(&self) -> Simulated {
        Simulated(Mutex::new(self.lock().clone()))
    }

    /// Bytes of a file.
    pub(super) fn length(&self, name: Name) -> usize {
        self.lock().body(name).map_or(0, |body| body.seen.len())
    }

    /// A byte changes by itself.
    pub(super) fn change(&self, name: Name, at: usize, by: u8) {
        let mut device = self.lock();
        let Ok(body) = device.body(name) else { unreachable!("{name} is there") };
        for bytes in [&mut body.durable, &mut body.seen] {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= by;
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Device> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One operation more.
    fn operate(&self) -> io::Result<MutexGuard<'_, Device>> {
        let mut device = self.lock();
        match &mut device.left {
            Some(0) => return Err(io::Error::other("the power has failed")),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(device)
    }
}

impl Device {
    fn body(&mut self, name: Name) -> io::Result<&mut Body> {
        let number = self.names.get(&name).copied();
        number.and_then(|number| self.bodies.get_mut(number)).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The power fails, and comes back.
    pub(super) fn cut_power(&mut self) {
        let mut names = BTreeMap::new();
        for name in self.names.keys().chain(self.durable.keys()) {
            let kept = if self.random.one_in(2) { self.names.get(name) } else { self.durable.get(name) };
            // A name that did not change has one meaning.
            names.extend(kept.map(|&number| (*name, number)));
        }
        for body in &mut self.bodies {
            if self.random.one_in(8) && body.durable.is_empty() {
                body.seen.clear(); // not even its length
            }
            body.settle(&mut self.random);
            body.seen.clone_from(&body.durable);
        }
        (self.names, self.durable) = (names.clone(), names);
        (self.fails_sync, self.is_full, self.left) = (false, false, None);
    }

    /// A bit changes by itself.
    pub(super) fn rot(&mut self) -> Option<String> {
        let names: Vec<Name> = self.names.keys().copied().collect();
        let name = *names.get(self.random.below(names.len() as u64) as usize)?;
        let bit = self.random.below(8);
        let mut at = self.random.word();
        let body = self.body(name).ok()?;
        // Where something is.
        let used: Vec<usize> = (0..body.durable.len()).filter(|&at| body.durable.get(at) != Some(&0)).collect();
        at %= used.len().max(1) as u64;
        let at = *used.get(at as usize)?;
        for bytes in [&mut body.durable, &mut body.seen] {
            *bytes.get_mut(at)? ^= 1 << bit;
        }
        Some(format!("{name} at {at}"))
    }
}

impl Files for Simulated {
    fn create(&self, name: Name, bytes: u64) -> io::Result<()> {
        let mut device = self.operate()?;
        if device.is_full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let number = device.bodies.len();
        device.bodies.push(Body { seen: vec![0; bytes as usize], ..Body::default() });
        device.names.insert(name, number);
        Ok(())
    }

    fn segments(&self) -> io::Result<Vec<u64>> {
        let device = self.operate()?;
        let number = |name: &Name| match name {
            Name::Segment(number) => Some(*number),
            _ => None,
        };
        Ok(device.names.keys().filter_map(number).collect())
    }

    fn read(&self, name: Name, at: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut device = self.operate()?;
        let seen = device.body(name)?.seen.get(at as usize..).unwrap_or_default();
        let has = seen.len().min(into.len());
        into[..has].copy_from_slice(&seen[..has]);
        Ok(has)
    }

    fn write(&self, name: Name, at: u64, parts: &[&[u8]]) -> io::Result<()> {
        let mut device = self.operate()?;
        let mut bytes = parts.concat();
        let is_full = device.is_full && matches!(name, Name::Segment(_));
        if is_full {
            let some = device.random.below(bytes.len() as u64) as usize;
            bytes.truncate(some);
        }
        let body = device.body(name)?;
        let (from, to) = (at as usize, at as usize + bytes.len());
        if body.seen.len() < to {
            body.seen.resize(to, 0);
        }
        body.seen[from..to].copy_from_slice(&bytes);
        body.note(from, to);
        if is_full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn clear(&self, name: Name, from: u64) -> io::Result<()> {
        let mut device = self.operate()?;
        let body = device.body(name)?;
        let (from, to) = ((from as usize).min(body.seen.len()), body.seen.len());
        body.seen[from..].fill(0);
        body.note(from, to);
        Ok(())
    }

    fn sync(&self, name: Name) -> io::Result<()> {
        let mut device = self.operate()?;
        let fails = std::mem::take(&mut device.fails_sync);
        let mut random = device.random.clone();
        let body = device.body(name)?;
        if fails {
            // As Linux does: the pages count as written from now on, and are still seen.
            body.settle(&mut random);
            device.random = random;
            return Err(io::Error::other("the device has failed"));
        }
        body.durable.clone_from(&body.seen);
        body.pending.clear();
        Ok(())
    }

    fn sync_folder(&self) -> io::Result<()> {
        let mut device = self.operate()?;
        device.durable = device.names.clone();
        Ok(())
    }

    fn remove(&self, name: Name) -> io::Result<()> {
        self.operate()?.names.remove(&name).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn path(&self, name: Name) -> String {
        format!("simulated/{name}")
    }
}
