//! Regions over plain TCP. To be written.
