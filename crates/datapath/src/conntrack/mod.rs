//! Flow records in user space: expiry (`gc`), port blocks that nothing uses (`blocks`), removal after an edit (`flush`), and
//! resets for idle pods whose connections were cut (`idle_reset`).

pub mod blocks;
pub mod flush;
pub mod gc;
pub mod idle_reset;
