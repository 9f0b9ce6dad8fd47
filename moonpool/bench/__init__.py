"""The measurements that `moonpool bench` runs."""
