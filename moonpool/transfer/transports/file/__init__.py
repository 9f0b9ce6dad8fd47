"""Files and block devices: NVMe, NVMe-oF, DAX and CXL devices by path."""
