//! Things by number, where a number is never used for two: its place, and how often the place was used before.

/// A place and its generation, as one number that fits an epoll event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) u64);

impl Key {
    fn new(index: usize, generation: u32) -> Key {
        Key(u64::from(generation) << 32 | index as u64)
    }

    fn index(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The things.
pub(crate) struct Places<T> {
    places: Vec<(u32, Option<T>)>,
    free: Vec<usize>,
}

impl<T> Default for Places<T> {
    fn default() -> Places<T> {
        Places { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Places<T> {
    pub(crate) fn insert(&mut self, thing: T) -> Key {
        let index = self.free.pop().unwrap_or(self.places.len());
        if index == self.places.len() {
            self.places.push((0, None));
        }
        let (generation, place) = &mut self.places[index];
        *place = Some(thing);
        Key::new(index, *generation)
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let (generation, thing) = self.places.get(key.index())?;
        thing.as_ref().filter(|_| *generation == key.generation())
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, thing) = self.places.get_mut(key.index())?;
        thing.as_mut().filter(|_| *generation == key.generation())
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let (generation, place) = self.places.get_mut(key.index())?;
        if *generation != key.generation() {
            return None;
        }
        let thing = place.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(key.index());
        Some(thing)
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(crate) fn keys(&self) -> Vec<Key> {
        let used = self.places.iter().enumerate().filter(|(_, (_, thing))| thing.is_some());
        used.map(|(index, (generation, _))| Key::new(index, *generation)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_never_finds_what_came_later_to_its_place() {
        let mut places = Places::default();
        let first = places.insert("first");
        assert_eq!(places.remove(first), Some("first"));
        let second = places.insert("second");
        assert_eq!((places.get(first), places.get(second)), (None, Some(&"second")));
        assert_eq!(places.remove(first), None);
        assert_eq!((places.len(), places.keys()), (1, vec![second]));
    }
}
