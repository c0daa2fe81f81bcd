//! A cluster of network namespaces.
